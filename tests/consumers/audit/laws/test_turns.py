"""Whatever a header says of the turn that wrote a record, the audit names the record and goes on."""

from __future__ import annotations

from millrace.consumers.audit import audit
from millrace.infra.log.base import Outgoing
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.history_records import POLICY

ODD = (
    b"",
    b"x",
    b"/",
    b"/0/7",
    b"\xff\xfe/0/1",
    b"nobody/0/1",
    b"refine/x/1",
    b"refine/\xff/0",
    b"refine/0/" + b"9" * 5000,
)


def test_turns_that_are_none_are_named() -> None:
    made = History(0, versions=2)
    placed = {}
    for kind in ("evaluations", "dead-letters"):
        topic = made.topic(kind)
        record = next(one for p in range(made.bus.partitions(topic)) for one in made.bus.read(topic, p))
        for turn in ODD:
            headers = {**record.headers, "turn": turn}
            out = Outgoing(topic, record.key, record.value, headers, record.partition)
            placed[made.bus.publisher().publish(out).result()] = kind, turn
    found = audit(made.bus, NS, POLICY).finding("outputs").violations
    named = {placed[place] for one in found for place in one.records if place in placed}
    # Letters of another policy's dispatch are audited with that policy.
    assert named == {(k, t) for k, t in placed.values() if k == "evaluations" or t.startswith(b"refine/")}
