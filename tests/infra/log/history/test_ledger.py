from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from millrace.infra.errors import LedgerError
from millrace.infra.log.base import Outgoing, Record, TopicSpec
from millrace.infra.log.history.ledger import entries, entry_hash, stored_hash
from millrace.infra.log.history.newest import head
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from tests.support.versions import entry, weights

LEDGER, WEIGHTS = "n.p.ledger", "n.p.weights"


def chain(count: int) -> list[Any]:
    rows: list[Any] = []
    for version in range(count):
        rows.append(entry(version, max(0, version - 1), version, rows[-1]["hash"] if rows else b""))
    return rows


@pytest.fixture
def bus() -> MemoryBus:
    one = MemoryBus()
    one.ensure_topics([TopicSpec(LEDGER, 1), TopicSpec(WEIGHTS, 1)])
    return one


def write(bus: MemoryBus, rows: list[Any], *, with_weights: bool = True, with_ledger: bool = True) -> None:
    with bus.transactor("t") as transactor:
        for row in rows:
            transactor.begin()
            if with_ledger:
                transactor.send(Outgoing(LEDGER, b"k", codec.encode("LedgerEntry", row)))
            if with_weights:
                event = codec.encode("WeightVersion", weights(row["version"], row["digest"]))
                transactor.send(Outgoing(WEIGHTS, b"p", event))
            transactor.commit({}, None)


def test_a_good_chain_reads_whole(bus: MemoryBus) -> None:
    write(bus, chain(5))
    assert [row["version"] for row in entries(bus.read(LEDGER, 0))] == list(range(5))


def test_the_hash_of_stored_bytes_is_the_hash_of_the_entry() -> None:
    row = chain(2)[1]
    assert stored_hash(codec.encode("LedgerEntry", row)) == entry_hash(row) == row["hash"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"digest": "other"}, "hash of its bytes"),
        ({"version": 9}, "follows version"),
        ({"seq_lo": 7, "seq_hi": 9}, "begins at seq"),
        ({"seq_hi": 0}, "ends before it begins"),
        ({"prev_hash": b"x" * 32}, "hash of its parent"),
    ],
)
def test_what_breaks_it_is_named(bus: MemoryBus, change: dict[str, Any], word: str) -> None:
    rows = chain(3)
    bad = {**rows[2], **change}
    if "digest" not in change:
        bad["hash"] = entry_hash(bad)
    write(bus, [*rows[:2], bad])
    with pytest.raises(LedgerError, match=word):
        list(entries(bus.read(LEDGER, 0)))


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (b"no record", "must start with C3 01"),
        (b"", "must start with C3 01"),
        (codec.encode("LedgerEntry", chain(3)[2])[:-1], "do not decode|expected"),
        (codec.encode("LedgerEntry", chain(3)[2]) + b"x", "1 bytes follow a LedgerEntry"),
        (codec.encode("Place", {"topic": "t", "partition": 0, "offset": 0}), "expected a LedgerEntry, found a Place"),
        (b"\xc3\x01" + b"fromafar", b"fromafar".hex()[:4]),
    ],
)
def test_what_is_no_entry_is_named_with_its_place(bus: MemoryBus, value: bytes, word: str) -> None:
    write(bus, chain(2))
    place = bus.publisher().publish(Outgoing(LEDGER, b"k", value)).result()
    at = rf"the record at {LEDGER}/0@{place.offset} is no ledger entry .*({word}).*; audit the policy"
    with pytest.raises(LedgerError, match=at):
        list(entries(bus.read(LEDGER, 0)))


def test_the_head_is_found_behind_holes_of_any_length(bus: MemoryBus) -> None:
    rows = chain(3)
    write(bus, rows)
    with bus.transactor("aborts") as transactor:
        for _ in range(200):
            transactor.begin()
            transactor.send(Outgoing(LEDGER, b"k", b"never"))
            transactor.send(Outgoing(WEIGHTS, b"k", b"never"))
            transactor.abort()
    found = head(bus, WEIGHTS, LEDGER)
    assert found is not None
    assert (found.version, found.seq_hi, found.weights["digest"]) == (2, 2, "digest-2")


def test_there_is_no_head_before_version_0(bus: MemoryBus) -> None:
    assert head(bus, WEIGHTS, LEDGER) is None


def test_topics_that_disagree_are_refused(bus: MemoryBus) -> None:
    rows = chain(2)
    write(bus, rows[:1])
    write(bus, rows[1:], with_weights=False)
    with pytest.raises(LedgerError, match="not written together"):
        head(bus, WEIGHTS, LEDGER, patience_s=0)


def test_a_version_that_shows_in_one_topic_first_is_waited_for(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = chain(2)
    write(bus, rows[:1])
    write(bus, rows[1:], with_weights=False)
    read, looks = bus.read, list[str]()

    def late(topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        looks.append(topic)
        if looks.count(WEIGHTS) == 2:
            write(bus, rows[1:], with_ledger=False)
        return read(topic, partition, start, end)

    monkeypatch.setattr(bus, "read", late)
    found = head(bus, WEIGHTS, LEDGER)
    assert found is not None
    assert found.version == 1
