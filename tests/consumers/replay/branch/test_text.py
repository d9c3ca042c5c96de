"""A branch of text alone: what its weight events say, and that neither a death nor lost events change it in silence."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from millrace.apps.demo import sort_digits, tiny
from millrace.consumers import policy_names
from millrace.consumers.audit import audit
from millrace.consumers.replay.branch import selection_file
from millrace.consumers.replay.branch.job import BranchOptions
from millrace.consumers.replay.branch.run import Brancher
from millrace.dialects.rendering.foreign_reply import MISREAD
from millrace.infra import faults
from millrace.infra.errors import BranchError
from millrace.infra.log.base import Outgoing
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.kinds import EVENTS
from millrace.infra.log.history.reader import History
from millrace.schemas import codec
from millrace.testing.events import Episode
from tests.support.branches import branch, events, everything
from tests.support.feed import feed
from tests.support.learners import Place

pytestmark = pytest.mark.slow

BRANCH = ("weights", "versions", "tiles", "ledger-chain", "figures", "leaders", "files")
"""laws about what this test does not write by hand"""
SIZE, GROUPS = 2, 12
SHORT = {"steps": 3, "save_every": 2, "batch": 8}
CLEARED = {"eligibility": "aggregate", "reason": "rule", "classification": "internal", "redaction": "none_needed"}
CLEARED |= {"redaction_version": "1", "policy_version": "1"}
NOTHING: dict[str, Any] = {"counts": {}, "findings": [], "retention_until": None, "residency": None}
TEXTS: dict[str, Any] = {"lineages": [], "tokens": 0, "length": 0, "v_head": -1, "v_tail": -1}


class Died(BaseException):
    """A process that is gone."""


@pytest.fixture(params=[True, False], ids=["judged", "unjudged"])
def judged(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def place(tmp_path: Path, judged: bool) -> Iterator[Place]:
    """A policy whose log holds what a provider said: right or wrong, and in one group what no form can say."""
    made = provided(tmp_path, judged=judged)
    yield made
    made.bus.close()


def provided(tmp_path: Path, *, judged: bool) -> Place:
    made = Place(tmp_path, **{"policy.group_size": SIZE})
    topic = History(made.bus, "t", "pico").names[EVENTS]
    digits = list(islice(sort_digits.prompts(0), GROUPS))
    calls = []
    for group in range(GROUPS):
        for sample in range(SIZE):
            said = "<eos>" if group == 0 else sort_digits.answer(digits[group]) if (group + sample) % SIZE else "0"
            asked = json.dumps({"messages": [{"role": "user", "content": digits[group]}]}).encode()
            reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
            changed = {"request": asked, "response": reply, "untrainable_reason": "imported"}
            made_up = Episode(f"trajectory-{group}-{sample}", policy="pico")
            call = made_up.call(f"r-{group}-{sample}", prompt=(), output=(), trainable=False, changed=changed)
            calls.append({**call, "governance": {**NOTHING, **CLEARED}})
    with made.bus.publisher() as publisher:
        where = [publisher.publish(Outgoing(topic, b"k", codec.encode("Event", call))) for call in calls]
        publisher.flush(60)
    places = [one.result() for one in where]

    def change(trajectory: dict[str, Any]) -> None:
        group, sample = trajectory["ticket"], trajectory["sample"]
        found = places[group * SIZE + sample]
        trajectory |= TEXTS | {"excluded": [f"r-{group}-{sample}:imported"], "events": [found._asdict()]}
        trajectory["reward"] = float((group + sample) % SIZE) if judged else None

    feed(made.bus, made.settings, range(GROUPS), version=0, change=change)
    return made


def test_text_is_imitated_and_said_to_be_text(place: Place, judged: bool) -> None:
    last, heard = branch(place.bus, place.settings, **SHORT)
    count = GROUPS - 1 if judged else (GROUPS - 1) * SIZE
    assert heard.items == count
    assert (last["text_replies"], last["text_form"], last["selection_places"]) == (count, "template", count)
    assert sum(number for why, number in heard.left_out.items() if MISREAD in why) == SIZE
    found = audit(place.bus, place.settings.namespace, "b", files=True).violations
    assert [one.message for one in found if one.law in BRANCH] == []


@pytest.mark.parametrize("judged", [True], indirect=True)
def test_a_death_changes_nothing_and_only_imitation_reads_text(place: Place) -> None:
    branch(place.bus, place.settings, "whole", **SHORT)

    def hook(passed: str) -> None:
        if passed == "branch.after_step":
            raise Died

    before = faults.install(hook)
    try:
        with pytest.raises(Died):
            branch(place.bus, place.settings, **SHORT)
    finally:
        faults.install(before)
    branch(place.bus, place.settings, **SHORT)
    ends = [[event["digest"] for event in events(place.bus, place.settings, name)] for name in ("b", "whole")]
    assert ends[0] == ends[1]
    with pytest.raises(BranchError, match="nothing is left to learn from"):
        branch(place.bus, place.settings, "other", method="awr", **SHORT)


@pytest.mark.parametrize("judged", [True], indirect=True)
def test_text_whose_events_are_gone_is_learned_from_no_more(place: Place) -> None:
    branch(place.bus, place.settings, steps=1, batch=8)
    for log in place.bus.logs[History(place.bus, "t", "pico").names[EVENTS]]:
        log.entries.clear()
    with pytest.raises(BranchError, match="so nothing says whether it may train"):
        branch(place.bus, place.settings, steps=1, batch=8)
    assert Counter(event["text_replies"] for event in events(place.bus, place.settings)) == {None: 1, GROUPS - 1: 1}


def test_text_is_written_as_of_the_day_of_its_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose form says the time: a branch that goes on another day ends with the same bytes, and one whose
    text would be written as other tokens is refused by the place of it."""
    monkeypatch.setattr(tiny, "TEMPLATE", tiny.TEMPLATE.replace("{% for", "{{ strftime_now('%d') }}{% for", 1))
    place = provided(tmp_path, judged=True)

    def made(name: str, day: int, steps: int = 3) -> None:
        options = BranchOptions(name, lr=1e-3, device="cpu", batch=8, save_every=1, steps=steps)
        told = Brancher(place.settings, place.bus, ClaimStore(place.settings.claims), lambda: datetime(2026, 5, day))
        told.run(options, everything)

    def hook(passed: str) -> None:
        if passed == "branch.committed":
            raise Died

    def begun(name: str) -> None:
        before = faults.install(hook)
        try:
            with pytest.raises(Died):
                made(name, day=4)
        finally:
            faults.install(before)

    made("whole", day=4)
    begun("b")
    made("b", day=29)
    ends = [[event["digest"] for event in events(place.bus, place.settings, name)] for name in ("b", "whole")]
    assert ends[0] == ends[1]

    begun("other")
    root = policy_names.weights_root(BranchOptions("other").settings(place.settings))
    file = root / selection_file.FILE
    file.write_bytes(file.read_bytes().replace(b"2026-05-04", b"2026-05-29"))
    first = selection_file.read(root).items[0].places[0]
    with pytest.raises(BranchError, match=rf"{first.topic}\[{first.partition}\]@{first.offset} is written as other"):
        made("other", day=4)
    place.bus.close()
