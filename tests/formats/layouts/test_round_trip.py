"""What `millrace export` writes, `millrace import` reads: what was said, its tools and its reward, wherever the layout
carries them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from millrace.dialects.dialogue import dialogue
from millrace.formats.exports import export_from
from millrace.formats.exports.select import Selection
from millrace.formats.layouts import OTHER_NAMES, READERS, WRITERS
from millrace.infra.log.history.reader import History
from millrace.schemas.records import ModelCall
from tests.support.conversations import Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY
from tests.support.imported import bodies, read

WORLD = Conversations(3)
UNREAD = {"prime-rl"}
"""layouts without a text: tokens alone are not imported"""
NO_REWARD = {"trl", "trl-messages", "openai"}
OWN = {"trl", "openai-preference"}
"""a row of the one is a call, also one that was retried later; this world has no pair for the other"""


def clear() -> Conversations:
    copy = WORLD.copy()
    for record, event in copy.rows("events"):
        copy.govern(record, event, eligibility="aggregate")
    return copy


def test_every_layout_that_is_written_with_text_is_read() -> None:
    assert WRITERS.keys() - UNREAD <= READERS.keys() | OTHER_NAMES.keys()


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - UNREAD - OWN))
def test_what_was_said_comes_back(name: str, tmp_path: Path) -> None:
    source = clear()
    export_from(History(source.bus, NS, POLICY), name, tmp_path / name, Selection(), "local")
    found, refused = read(tmp_path / name)
    assert refused == []
    assert len(found) > 3
    sealed = {row["id"]: row for _, row in source.rows("trajectories")}
    seen = 0
    for group, records in found:
        lasts: dict[str, Any] = {}
        for call in bodies(records, "model_call"):
            lasts[call["lineage"]] = dialogue(cast(ModelCall, call))
        rewards = bodies(records, "reward")
        assert len(rewards) == (0 if name in NO_REWARD else len(group.episodes))
        for number, said in enumerate(lasts.values()):
            trajectory = said.reply["content"].rpartition("(")[2].rstrip(")")
            talk = [{**one, "content": one.get("content") or ""} for one in source.said[trajectory]]
            assert said.whole == talk
            assert bool(said.tools) == (name not in ("jsonl", "parquet", "hf", "atropos"))
            seen += 1
            if rewards:
                assert rewards[number]["value"] == pytest.approx(sealed[trajectory]["reward"])
    assert seen >= len(found)


def test_a_call_comes_back_as_the_row_that_it_was(tmp_path: Path) -> None:
    export_from(History(clear().bus, NS, POLICY), "trl", tmp_path / "trl", Selection(), "local")
    rows = [orjson.loads(line) for line in (tmp_path / "trl").read_bytes().splitlines()]
    found, refused = read(tmp_path / "trl")
    assert (len(found), refused) == (len(rows), [])
    for row, (_, records) in zip(rows, found, strict=True):
        said = [dialogue(cast(ModelCall, call)) for call in bodies(records, "model_call")]
        assert [(one.messages, [one.reply]) for one in said] == [(row["prompt"], row["completion"])]
