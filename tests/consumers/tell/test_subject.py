"""Every id of a trajectory leads to it, and what several bear is never decided silently."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from millrace.consumers.tell.command import account_of, one_of
from millrace.consumers.tell.subject import episodes, place_in
from millrace.consumers.tell.topics import PolicyTopics
from millrace.infra.errors import LookError
from millrace.infra.log.base import Place
from millrace.infra.log.history.rows import as_stored
from millrace.schemas import codec
from tests.support.conversations import Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY


@cache
def world() -> Conversations:
    return Conversations(5)


def topics(source: Conversations | None = None) -> PolicyTopics:
    return PolicyTopics((source or world()).bus, NS, POLICY, as_stored)


def named(wanted: str) -> list[str]:
    return [found.id for found in episodes(topics(), wanted)]


@pytest.mark.parametrize("which", [0, 7, -1])
def test_every_id_of_a_trajectory_leads_to_it(which: int) -> None:
    record, sample = world().rows("trajectories")[which]
    ids: list[str] = [sample["id"], sample["attempt"]]
    ids += [f"{record.topic}[{record.partition}]@{record.offset}", f"{record.topic}/{record.partition}@{record.offset}"]
    for place, event in world().rows("events"):
        if event["trajectory"] == sample["id"]:
            ids += [event["id"], f"{place.topic}[{place.partition}]@{place.offset}"]
            body = codec.decode_body(event["kind"], event["body"])
            ids += [body[name] for name in ("call_id", "response_id", "lineage", "reward_id") if body.get(name)]
    assert len(ids) > 12
    assert {wanted: named(wanted) for wanted in ids} == {wanted: [sample["id"]] for wanted in ids}


def test_an_evaluation_is_found_too() -> None:
    _, sample = world().rows("evaluations")[0]
    assert named(sample["id"]) == named(sample["attempt"]) == [sample["id"]]


def test_a_group_or_ticket_names_all_its_trajectories_and_nobody_chooses() -> None:
    _, sample = next(pair for pair in world().rows("trajectories") if pair[1]["ticket"] is not None)
    group = {row["id"] for _, row in world().rows("trajectories") if row["group"] == sample["group"]}
    assert len(group) == 2
    for wanted in (sample["group"], str(sample["ticket"])):
        assert set(named(wanted)) == group
        with pytest.raises(LookError, match="names 2 trajectories") as error:
            account_of(topics(), wanted)
        assert all(id in str(error.value) for id in group)


def test_an_attempt_that_two_trajectories_bear_is_ambiguous() -> None:
    copy = world().copy()
    first, second = copy.rows("trajectories")[:2]
    for record, event in copy.rows("events"):
        if event["trajectory"] == second[1]["id"]:
            copy.rewrite(record, {**event, "attempt": first[1]["attempt"]})
    copy.rewrite(second[0], {**second[1], "attempt": first[1]["attempt"]})
    found = episodes(topics(copy), first[1]["attempt"])
    assert {one.id for one in found} == {first[1]["id"], second[1]["id"]}


def test_a_sealed_trajectory_is_found_when_its_events_are_gone() -> None:
    copy = world().copy()
    _, sample = copy.rows("trajectories")[0]
    for kind in ("events", "raw"):
        for record, _ in copy.rows(kind):
            copy.rewrite(record, None)
    told = account_of(topics(copy), sample["id"])
    assert (told.id, told.reward, told.branches) == (sample["id"], sample["reward"], ())
    assert sum(lineage.length for lineage in told.lineages) == sample["length"]


@pytest.mark.parametrize("wanted", ["nobody", "99999", "", "test.events[0]@99999", "test.events[9]@0", "no.topic[0]@0"])
def test_what_nobody_knows_is_said_to_be_unknown(wanted: str) -> None:
    with pytest.raises(LookError, match="nothing is known"):
        one_of(episodes(topics(), wanted), wanted, topics())


def test_a_record_of_another_kind_names_no_trajectory() -> None:
    record, _ = world().rows("ledger")[1]
    assert named(f"{record.topic}[0]@{record.offset}") == []


def test_an_id_of_another_policy_says_whose_it_is() -> None:
    copy = world().copy()
    record, event = copy.rows("events")[3]
    headers: dict[str, Any] = {**record.headers, "policy": b"other", "id": event["id"].encode()}
    moved: Any = type(record)
    copy.bus.logs[record.topic][record.partition].entries[record.offset] = moved(
        **{name: getattr(record, name) for name in record.__dataclass_fields__} | {"headers": headers}
    )
    copy.rewrite(copy.rows("raw")[0][0], copy.rows("raw")[0][1])
    with pytest.raises(LookError, match="is of policy other"):
        one_of([], event["id"], topics(copy))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a.b-c[3]@17", Place("a.b-c", 3, 17)),
        ("a.b/0@0", Place("a.b", 0, 0)),
        ("a.b[3]", None),
        ("a[b]@1", None),
        ("a[1]@-1", None),
        ("12", None),
    ],
)
def test_places_are_read_as_they_are_written(text: str, place: Place | None) -> None:
    assert place_in(text) == place
