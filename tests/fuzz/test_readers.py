"""No valid record and no bytes in any topic end a role that reads the log: each takes records that fit their schema and
make no sense, of every kind, in every topic that it reads.

`make fuzz N=...` draws more of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from millrace.consumers.audit import audit
from millrace.consumers.tell import status as tables
from millrace.consumers.tell.command import explain_in
from millrace.consumers.tell.pages import report_page
from millrace.consumers.tell.status import StatusWatch
from millrace.consumers.tell.summary import summary
from millrace.consumers.tell.topics import PolicyTopics
from millrace.infra.errors import AuditError
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.history.kinds import HOLDS, topics_of
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from tests.support.odd import records

COUNT = max(int(os.environ.get("MILLRACE_FUZZ", "0")) // 1000, 60)
OTHERS = int(os.environ.get("MILLRACE_FUZZ_SEED") or 0)
NAMESPACE, POLICY = "w", "p"
TOPICS = topics_of(NAMESPACE, POLICY)
Written = list[tuple[str, bytes | None, bytes]]
"""(kind of topic, value, key)"""


@st.composite
def histories(draw: st.DrawFn) -> Written:
    """Records of any kind where they belong, and now and then bytes, nothing, or a record of another kind."""
    written: Written = []
    kinds = sorted(HOLDS)
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(kinds))
        what = draw(st.integers(0, 9))
        name = draw(st.sampled_from(HOLDS[draw(st.sampled_from(kinds)) if what == 0 else kind]))
        value: bytes | None = codec.encode(name, _record(draw, name))
        if what == 1:
            value = draw(st.one_of(st.none(), st.binary(max_size=20), st.just(codec.MARK + b"\xff" * 9)))
        written.append((str(kind), value, draw(st.sampled_from([b"p", b"0", b"local/g", b"\xff", b""]))))
    return written


def _record(draw: st.DrawFn, name: str) -> Any:
    record = draw(records(name))
    if name == "Event" and draw(st.booleans()):
        kind = draw(st.sampled_from(sorted(codec.BODIES)))
        return {**record, "kind": kind, "body": codec.encode_body(kind, draw(records(codec.BODIES[kind])))}
    if "policy" in record and draw(st.booleans()):
        return {**record, "policy": POLICY}
    return record


def log_of(written: Written) -> MemoryBus:
    """A log that holds them."""
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec(topic, 1) for topic in TOPICS.values()])
    for kind, value, key in written:
        bus.append(Outgoing(TOPICS[kind], key, value, partition=0), None)
    return bus


def watched(bus: MemoryBus) -> None:
    watch = StatusWatch(bus, NAMESPACE, POLICY)
    watch.catch_up()
    tables.learning(watch)
    tables.workers(watch, 1)


def explained(bus: MemoryBus) -> None:
    for wanted in ("x", "0", "7", "p", "{}", "local", "w.raw/0@0"):
        explain_in(PolicyTopics(bus, NAMESPACE, POLICY), wanted, text=True)


def audited(bus: MemoryBus) -> None:
    with suppress(AuditError):  # a log without anything of the policy
        audit(bus, NAMESPACE, POLICY)


def reported(bus: MemoryBus) -> None:
    with suppress(AuditError):
        report_page(summary(bus, NAMESPACE, POLICY, 1), audit(bus, NAMESPACE, POLICY))


READERS: dict[str, Callable[[MemoryBus], Any]] = {
    "audit": audited,
    "report": reported,
    "why": explained,
    "status": watched,
}
SLOWER = {"report": 6}
"""what takes so many times as long as the others, as it draws"""


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_no_record_ends_a_reader(reader: str) -> None:
    @seed(OTHERS)
    @settings(
        derandomize=not OTHERS, max_examples=COUNT // SLOWER.get(reader, 1), suppress_health_check=list(HealthCheck)
    )
    @given(histories())
    def reads(written: Written) -> None:
        READERS[reader](log_of(written))

    reads()
