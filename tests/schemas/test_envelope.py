"""The one maker of events: every field is the one that was given, or the one that nobody but refine sets."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from millrace.schemas import codec, envelope
from millrace.schemas.chain import LONG, START, begin, event_hash
from millrace.schemas.envelope import Belonging, ChainLink, EventNumber
from millrace.schemas.records import Event, EventKind

texts = st.text(max_size=9)
maybe = st.none() | texts
counts = st.integers(0, 2**31 - 1)
times = st.integers(0, 2**63 - 1)
whose = st.builds(Belonging, *[texts] * 6, st.sampled_from(["train", "evaluation"]), maybe, maybe, maybe)
numbers = st.builds(EventNumber, texts, counts, st.none() | times)
links = st.just(ChainLink()) | st.builds(ChainLink, counts, st.binary(min_size=32, max_size=32))
kinds = st.sampled_from(get_args(EventKind))


@given(whose, kinds, st.binary(max_size=9), texts, texts, numbers, links, times, times, maybe, maybe)
def test_an_event_says_what_was_given_and_nothing_of_refine(
    owner: Belonging,
    kind: EventKind,
    body: bytes,
    id: str,
    actor: str,
    number: EventNumber,
    after: ChainLink,
    happened: int,
    captured: int,
    parent_event: str | None,
    span_id: str | None,
) -> None:
    event = envelope.draft(
        owner,
        kind,
        body,
        id=id,
        actor=actor,
        number=number,
        after=after,
        event_time=happened,
        capture_time=captured,
        parent_event=parent_event,
        span_id=span_id,
    )
    wanted: Event = {
        "id": id,
        "kind": kind,
        "tenant": owner.tenant,
        "policy": owner.policy,
        "group": owner.group,
        "root_trajectory": owner.root,
        "trajectory": owner.trajectory,
        "parent_trajectory": owner.parent,
        "parent_event": parent_event,
        "spawn_call": owner.spawn_call,
        "attempt": owner.attempt,
        "step": after.step,
        "actor": actor,
        "split": owner.split,
        "event_time": happened,
        "capture_time": captured,
        "log_time": None,
        "source": number.source,
        "source_epoch": number.epoch,
        "source_seq": number.seq,
        "prev_hash": after.link,
        "hash": b"",
        "hash_version": 2,
        "source_place": None,
        "source_hash": None,
        "trace_id": owner.trace_id,
        "span_id": span_id,
        "governance": None,
        "body_encoding": "plain",
        "body": body,
    }
    assert event == wanted
    done = envelope.link(event)
    assert {**done, "hash": b""} == event
    assert done["hash"] == event_hash(after.link, event)
    assert codec.decode_as("Event", codec.encode("Event", done)) == done
    numbered = {} if number.seq is None else {"source-seq": str(number.seq)}
    assert list(envelope.headers_of(done, "mark").items()) == list(
        {
            "id": id,
            "kind": kind,
            "policy": owner.policy,
            "group": owner.group,
            "trajectory": owner.trajectory,
            "source": "mark",
            **numbered,
        }.items()
    )
    assert envelope.headers_of(done)["source"] == number.source


def test_a_link_that_was_begun_ahead_is_the_same() -> None:
    owner, number = Belonging("t", "p", "g", "r", "r", "a", "train"), EventNumber("s", 0, 3)
    event = envelope.draft(
        owner,
        "gap",
        bytes(LONG),
        id="i",
        actor="a",
        number=number,
        after=ChainLink(0, START),
        event_time=1,
        capture_time=1,
    )
    assert envelope.link(event, begin(event)) == envelope.link(event)
