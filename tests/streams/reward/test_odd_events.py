"""The judge survives any record, and any words of a verifier."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.log.base import Record
from millrace.schemas import bounds, codec
from millrace.streams.reward.judge import Evaluator, Judge
from millrace.streams.reward.pool import Verdict
from millrace.streams.reward.verifiers import normal
from millrace.testing.events import Episode
from tests.support.odd import records


class Deaf:
    """A pool that does not look."""

    async def judge(self, task: str, output: str, episode: dict[str, Any]) -> Verdict:
        return Verdict(1.0, {}, None, None, None)


def record(value: bytes) -> Record:
    return Record("ns.events", 0, 3, b"local/g", value, {"kind": b"episode_ended"}, 0)


@given(st.data())
async def test_any_record_is_survived(data: st.DataObject) -> None:
    judging = Judge(Deaf(), Evaluator("verifier", "exact", "1"), "p", clock=lambda: 99)
    body: Any = data.draw(records("EpisodeEnded"))
    event: Any = data.draw(records("Event"))
    ended = Episode("r1", policy="p").event("episode_ended", {**body, "awaits": ["verifier"]})
    for one in (event, ended, {**ended, "body": b"torn"}, {**event, "policy": "p", "kind": "episode_ended"}):
        await judging(record(codec.encode("Event", one)))
    await judging(record(codec.encode("Progress", {"stage": "s", "slot": 0, "time": 0})))
    await judging(record(b"torn"))


def test_words_that_cannot_be_stored_are_mended() -> None:
    said = normal({"value": 1, "label": "half \ud800", "critique": "\udfff", "components": {"\ud800": 1}})
    assert (said["label"], said["critique"], said["components"]) == ("half ?", "?", {"?": 1.0})


@pytest.mark.parametrize(
    "answer",
    [
        2 * bounds.REWARD,
        {"value": 1, "components": {"x" * (bounds.NAME_BYTES + 1): 1}},
        {"value": 1, "components": {str(n): 1 for n in range(bounds.NAMES + 1)}},
        {"value": 1, "components": {"x": -2 * bounds.REWARD}},
    ],
)
def test_a_verdict_beyond_its_bounds_is_a_labelled_failure(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"verdict|component"):
        normal(answer)
