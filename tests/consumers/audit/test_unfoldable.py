"""What a stage could not fold is folded again to the same letter, and a letter over what can be folded is named.

The stages here raise at chosen records and timers, after they have begun to answer: what was undone then must be undone
when an audit folds the turn again."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from millrace.infra.log.base import Record
from millrace.infra.stages.base import Op, Stage, View
from millrace.infra.stages.letters import DEAD_LETTERS, UNFOLDABLE, dead_letter, place_of
from millrace.schemas import codec
from millrace.streams.dispatch.stage import Dispatch
from millrace.streams.refine.stage import Refine
from millrace.streams.seal.stage import Seal
from tests.consumers.audit.corruptions.forgeries import append, uncount, write
from tests.support.whole import Whole, whole

SEED = 5


class Boom(Exception):
    """What the stages raise."""


def chosen(what: bytes, one_of: int) -> bool:
    """One of so many, and the same ones whenever it is asked."""
    return int.from_bytes(hashlib.sha256(what).digest()[:4]) % one_of == 0


def breaking(patch: pytest.MonkeyPatch, stage: type[Stage], records: int, timers: int = 0) -> None:
    """From now on a stage raises at one of so many records and timers, having answered them as ever."""
    on_record, on_wake = stage.on_record, stage.on_wake

    def raising_record(self: Stage, view: View, record: Record, now: int) -> Iterable[Op]:
        yield from on_record(self, view, record, now)
        if chosen(record.value or b"", records):
            raise Boom

    def raising_wake(self: Stage, view: View, key: str, now: int) -> Iterable[Op]:
        yield from on_wake(self, view, key, now)
        if timers and chosen(key.encode(), timers):
            raise Boom

    patch.setattr(stage, "on_record", raising_record)
    patch.setattr(stage, "on_wake", raising_wake)


@pytest.fixture(scope="module")
def broken() -> Iterator[Whole]:
    """A history whose stages could not fold all of it; as long as it is in use they still cannot."""
    with pytest.MonkeyPatch.context() as patch:
        breaking(patch, Refine, 20)
        breaking(patch, Seal, 25, 6)
        breaking(patch, Dispatch, 25)
        yield whole(SEED, isolate=True)


def letters(history: Whole) -> list[tuple[Record, dict[str, Any]]]:
    return [(record, row) for record, row in history.rows("dead-letters") if row["reason"] == UNFOLDABLE]


def test_what_could_not_be_folded_comes_to_the_same_again(broken: Whole) -> None:
    found = Counter((row["stage"], row["place"]["offset"] >= 0) for _, row in letters(broken))
    assert set(found) == {("refine", True), ("seal", True), ("seal", False), ("p.dispatch", True)}, "of each kind one"
    assert any("group cannot be closed" in row["detail"] for _, row in letters(broken))
    report = broken.audit()
    assert report.clean, report.violations[:3]
    assert not report.finding("folds").notes


@pytest.mark.parametrize("stage", ["refine", "seal", "p.dispatch"])
def test_a_letter_that_a_fold_gives_is_missed(broken: Whole, stage: str) -> None:
    forged = broken.copy()
    uncount(forged, next(record for record, row in letters(forged) if row["stage"] == stage))
    assert not forged.audit().finding("folds").holds


def test_a_letter_with_another_error_is_named(broken: Whole) -> None:
    forged = broken.copy()
    record, row = letters(forged)[0]
    write(forged, record, row | {"detail": "folding it raised KeyError"})
    report = forged.audit()
    assert [finding.law for finding in report.findings if not finding.holds] == ["folds"]
    assert "detail" in report.violations[0].message


def folded_by(history: Whole, role: str, record: Record) -> tuple[Record, dict[str, Any]]:
    """The turn of a stage that folded a record."""
    topic = record.topic.partition(".")[2]
    return next(
        (found, turn)
        for found, turn in history.rows(f"turns.{role}")
        for span in turn["ranges"]
        if (span["topic"], span["partition"]) == (topic, record.partition)
        and span["first"] <= record.offset <= span["last"]
    )


def forge_letter(history: Whole, role: str, record: Record) -> None:
    """The letter that the runner would have written of a record, and its turn counts it."""
    found, turn = folded_by(history, role, record)
    emit = dead_letter(turn["stage"], place_of(record), UNFOLDABLE, "folding it raised Boom", turn["now"], key="forged")
    like = next(history.records("dead-letters"))
    headers = {name: text.encode() for name, text in emit.headers.items()}
    headers["turn"] = f"{turn['stage']}/{turn['slot']}/{turn['number']}".encode()
    letter = replace(like, key=b"forged", headers=headers, value=codec.encode_by_name(emit.name, emit.record))
    append(history, letter)
    emitted = turn["emitted"] | {DEAD_LETTERS: turn["emitted"].get(DEAD_LETTERS, 0) + 1}
    write(history, found, turn | {"emitted": emitted})


def sealed(history: Whole, kind: str) -> Record:
    """An event of a sealed episode."""
    roots = {row["id"] for _, row in history.rows("trajectories") if row["rewards"] and row["events"]}
    dead = {tuple(row["place"].values()) for _, row in history.rows("dead-letters")}
    return next(
        record
        for record, row in history.rows("events")
        if row["kind"] == kind and row["root_trajectory"] in roots and tuple(record.place) not in dead
    )


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        ("seal", "episode_started"),
        ("seal", "model_call"),
        ("seal", "reward"),
        ("seal", "episode_ended"),
        ("dispatch", "completions"),
        ("refine", "raw"),
    ],
)
def test_a_letter_over_what_can_be_folded_is_named(broken: Whole, role: str, kind: str) -> None:
    forged = broken.copy()
    dead = {tuple(row["place"].values()) for _, row in broken.rows("dead-letters")}
    alive = (record for record in broken.records(kind) if tuple(record.place) not in dead) if role != "seal" else ()
    forge_letter(forged, role, next(iter(alive), None) or sealed(forged, kind))
    report = forged.audit()
    assert report.finding("outputs").holds, "it is counted by its turn"
    assert not report.finding("folds").holds


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("model_call", "a model call is in a sample and has a dead letter"),
        ("reward", "which no judge gave"),
        ("episode_ended", "of an episode that did not end"),
    ],
)
def test_a_sample_holds_nothing_that_could_not_be_folded(broken: Whole, kind: str, message: str) -> None:
    """The law tells without folding again."""
    forged = broken.copy()
    forge_letter(forged, "seal", sealed(forged, kind))
    (violation,) = forged.audit(quick=True).violations
    assert message in violation.message
