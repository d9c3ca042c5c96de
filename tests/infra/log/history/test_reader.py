"""Whatever lies in a topic, a reading gives every record that can be read, once, in order, and names the rest."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.errors import ClaimError, StorageError, TopicError
from millrace.infra.log.base import Bus, Outgoing, Place, Record, TopicSpec
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.follow import Follower, PartitionCursor
from millrace.infra.log.history.kinds import DECISIONS, HOLDS, LEDGER, RESOLUTIONS, WEIGHTS, WORKERS, topics_of
from millrace.infra.log.history.reader import History, Stretch, left_out, name_in_log
from millrace.infra.log.history.rows import Row
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.topics import TopicSizes
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError
from tests.support import logged

PATIENCE_S = 120.0


def decision(number: int, policy: str | None = "p", value: str = "1") -> dict[str, Any]:
    return {
        "id": f"d{number}",
        "kind": "setting",
        "policy": policy,
        "name": "eta",
        "value": value,
        "reason": "r",
        "author": "a",
        "time": number,
    }


def encoded(number: int, policy: str | None = "p") -> bytes:
    return codec.encode("Decision", decision(number, policy))


def ids(rows: list[Row] | list[Row[Any]]) -> list[str]:
    return [row["id"] for row in rows]


def test_the_kinds_are_the_topics_of_the_one_table() -> None:
    table = {spec.name for spec in TopicSizes("n", "p").specs() if ".changelog." not in spec.name}
    assert set(topics_of("n", "p").values()) == table
    assert topics_of("n", "p").keys() == HOLDS.keys()


Fate = st.sampled_from(["good", "bad", "tombstone", "foreign", "aborted", "other", "nobody"])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[MemoryBus, list[list[tuple[str, Record]]]]:
    """Decisions on two partitions, and what became of each record that was committed."""
    clock = iter(range(1_000, 10_000_000, 500))
    bus = MemoryBus(clock=lambda: next(clock))
    bus.ensure_topics([TopicSpec("n.decisions", 2)])
    kinds: list[list[tuple[str, Record]]] = [[], []]
    values = {"bad": b"\xc3\x01torn", "tombstone": None, "foreign": codec.encode("Progress", PROGRESS)}
    for number, (partition, fate) in enumerate(draw(st.lists(st.tuples(st.integers(0, 1), Fate), max_size=24))):
        whose = {"other": "q", "nobody": None}.get(fate, "p")
        value = values.get(fate, encoded(number, whose)) if fate in values else encoded(number, whose)
        with bus.transactor("t") as transactor:
            transactor.begin()
            transactor.send(Outgoing("n.decisions", b"k%d" % (number % 3), value, {}, partition))
            if fate == "aborted":
                transactor.abort()
            else:
                transactor.commit({}, None)
                kinds[partition].append((fate, list(bus.read("n.decisions", partition))[-1]))
    return bus, kinds


PROGRESS = {"stage": "seal", "slot": 0, "time": 0}
READABLE = ("good", "other", "nobody")


@given(worlds(), st.data())
def test_rows_are_what_can_be_read_and_the_rest_is_told(
    world: tuple[MemoryBus, list[list[tuple[str, Record]]]], data: st.DataObject
) -> None:
    bus, kinds = world
    history = History(bus, "n", "p")
    told: list[Place] = []

    def tell(kind: str, record: Record, error: SchemaError | ClaimError) -> None:
        assert kind == "decisions"
        told.append(record.place)

    flat = [one for partition in kinds for one in partition]
    rows = list(history.rows(DECISIONS, unreadable=tell))
    assert [row.raw for row in rows] == [record for fate, record in flat if fate in READABLE]
    assert told == [record.place for fate, record in flat if fate not in READABLE]
    assert all(codec.encode(row.name, row.record) == row.raw.value == row.value for row in rows)
    own = [record for fate, record in flat if fate in ("good", "nobody")]
    assert [row.raw for row in history.rows(DECISIONS, own=True, unreadable=left_out)] == own

    start, size = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    since, until = data.draw(st.integers(0, 20_000)), data.draw(st.integers(0, 20_000))
    end = data.draw(st.sampled_from([None, start + size]))
    stretch = Stretch(start, end, data.draw(st.sampled_from([None, since])), data.draw(st.sampled_from([None, until])))
    inside = [
        record
        for _, record in kinds[1]
        if record.offset >= start
        and (end is None or record.offset < end)
        and (stretch.since is None or record.timestamp >= stretch.since)
        and (stretch.until is None or record.timestamp < stretch.until)
    ]
    assert list(history.records(DECISIONS, 1, stretch)) == inside

    places = [record.place for _, record in flat] + [Place("n.other", 0, 0), Place("n.decisions", 9, 0)]
    fetched = history.fetch(DECISIONS, places, left_out)
    wanted = [record if fate in READABLE else None for fate, record in flat] + [None, None]
    assert [row and row.raw for row in fetched] == wanted


@given(worlds(), st.integers(1, 5))
def test_following_gives_what_reading_gives(world: tuple[MemoryBus, list[list[tuple[str, Record]]]], most: int) -> None:
    bus, kinds = world
    history = History(bus, "n", "p")
    wanted = [[record for fate, record in partition if fate in READABLE] for partition in kinds]
    with Follower(history, [DECISIONS], left_out) as follower:
        followed = [row.raw for _ in range(30) for row in follower.poll(0, most)]
    assert [[record for record in followed if record.partition == p] for p in (0, 1)] == wanted
    with Follower(history, [DECISIONS], left_out) as follower:
        assert [row.raw for row in follower.catch_up()] == wanted[0] + wanted[1]
        assert list(follower.catch_up()) == follower.poll(0) == []
    cursor, taken = PartitionCursor(history, DECISIONS, 1, unreadable=left_out), []
    for end in [*range(0, 40, most), None]:
        taken += [row.raw for row in cursor.rows_on(end)]
    assert taken == wanted[1]


def test_a_record_whose_taker_raises_is_given_again() -> None:
    bus = MemoryBus({"n.decisions": 1})
    for number in range(3):
        bus.publisher().publish(Outgoing("n.decisions", b"k", encoded(number))).result()
    cursor = PartitionCursor(History(bus, "n", "p"), DECISIONS)

    def take() -> None:
        for row in cursor.rows_on():
            if row["id"] == "d1":
                raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        take()
    assert [row["id"] for row in cursor.rows_on()] == ["d1", "d2"]


def test_a_stand_in_takes_the_place_of_what_cannot_be_read() -> None:
    bus = MemoryBus({"n.decisions": 1})
    bus.publisher().publish(Outgoing("n.decisions", b"k", b"torn")).result()

    def stand_in(kind: str, record: Record, error: SchemaError | ClaimError) -> Row:
        return Row(record, "Decision", {"id": "stand-in", "policy": None}, b"", kind)

    assert ids(list(History(bus, "n", "p").rows(DECISIONS, unreadable=stand_in))) == ["stand-in"]


def test_only_what_is_wanted_is_decoded() -> None:
    bus = MemoryBus({"n.decisions": 1})
    bus.publisher().publish(Outgoing("n.decisions", b"bad", b"torn")).result()
    bus.publisher().publish(Outgoing("n.decisions", b"good", encoded(1))).result()

    def never(kind: str, record: Record, error: SchemaError | ClaimError) -> Row:
        raise AssertionError(record)

    rows = History(bus, "n", "p").rows(DECISIONS, only=lambda record: record.key == b"good", unreadable=never)
    assert ids(list(rows)) == ["d1"]


def test_a_topic_that_does_not_exist_is_empty_to_read_and_an_error_to_follow() -> None:
    history = History(MemoryBus(), "n", "p")
    assert not history.partitions(LEDGER)
    assert not history.starts(LEDGER) | history.ends(LEDGER) | history.log_ends(LEDGER)
    assert list(history.rows(LEDGER)) == list(history.records(LEDGER, stretch=Stretch(since=5))) == []
    assert history.fetch(LEDGER, [Place("n.p.ledger", 0, 0)]) == [None]
    with pytest.raises(TopicError):
        Follower(history, [LEDGER])
    with pytest.raises(TopicError):
        list(PartitionCursor(history, LEDGER).rows_on())


def test_what_cannot_be_read_is_named_by_place_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    bus = MemoryBus({"n.decisions": 1})
    bus.publisher().publish(Outgoing("n.decisions", b"k", b"torn")).result()
    bus.publisher().publish(Outgoing("n.decisions", b"k", codec.encode("Decision", decision(1, "p" * 2000)))).result()
    assert list(History(bus, "n", "p", is_bounded=True).rows(DECISIONS)) == []
    first, second = logged.lines(caplog, "millrace.infra.log.readable")
    assert first == "n.decisions[0]@0 is passed over: it is no Decision (CorruptRecord)"
    assert second.startswith("n.decisions[0]@1 is passed over: policy of Decision is beyond its bound of ")
    assert len(list(History(bus, "n", "p").rows(DECISIONS))) == 1, "only who acts on records asks for their bounds"


def test_large_records_are_read_behind_their_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus, store = MemoryBus({"n.decisions": 1}), ClaimStore(str(tmp_path))
    claim = codec.encode("Claim", store.store("Decision", encoded(7)))
    bus.publisher().publish(Outgoing("n.decisions", b"k", claim)).result()
    (row,) = History(bus, "n", "p", store.resolve).rows(DECISIONS)
    assert (row["id"], row.raw.value, row.value) == ("d7", claim, encoded(7))
    assert list(History(bus, "n", "p").rows(DECISIONS, unreadable=left_out)) == [], "unresolved, it is no Decision"

    def away(*_: object) -> bytes:
        raise TimeoutError("no answer")

    monkeypatch.setattr(store._fs, "cat_file", away)
    with pytest.raises(StorageError):
        list(History(bus, "n", "p", store.resolve).rows(DECISIONS, unreadable=name_in_log))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.unlink()
    monkeypatch.undo()
    assert list(History(bus, "n", "p", store.resolve).rows(DECISIONS)) == []


def test_one_record_is_held_at_a_time() -> None:
    bus = MemoryBus({"n.decisions": 1})
    for number in range(50):
        bus.publisher().publish(Outgoing("n.decisions", b"k", encoded(number))).result()
    read, given = bus.read, list[int]()

    def counted(topic: str, partition: int, start: int = 0, end: int | None = None) -> Any:
        for record in read(topic, partition, start, end):
            given.append(record.offset)
            yield record

    bus.read = counted  # type: ignore[method-assign]
    rows = History(bus, "n", "p").rows(DECISIONS)
    assert [next(rows)["id"] for _ in range(3)] == ["d0", "d1", "d2"]
    assert given == [0, 1, 2]


# -- what a real log does to a topic, on both siblings of the bus


def make(bus: Bus, kind: str, partitions: int = 1, **config: str) -> History:
    history = History(bus, f"n{uuid.uuid4().hex[:12]}", "p")
    settings = {name.replace("_", "."): value for name, value in config.items()}
    bus.ensure_topics([TopicSpec(history.names[kind], partitions, settings)])
    return history


def put(bus: Bus, topic: str, *numbers: int, abort: bool = False) -> None:
    with bus.transactor(f"t-{uuid.uuid4().hex}") as transactor:
        transactor.begin()
        for number in numbers:
            transactor.send(Outgoing(topic, b"k%d" % (number % 2), encoded(number), {}, 0))
        transactor.flush()
        if abort:
            transactor.abort()
        else:
            transactor.commit({}, None)


def poll_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def await_ids(read: Callable[[], list[str]], wanted: list[str]) -> None:
    """A commit is visible soon, not at once."""
    poll_until(lambda: read() == wanted)


def test_aborted_and_open_transactions_are_never_read(bus: Bus) -> None:
    history = make(bus, DECISIONS)
    topic = history.names[DECISIONS]
    with Follower(history, [DECISIONS]) as follower:
        put(bus, topic, 0, 1)
        put(bus, topic, 2, 3, abort=True)
        put(bus, topic, 4)
        await_ids(lambda: ids(list(history.rows(DECISIONS))), ["d0", "d1", "d4"])
        with bus.transactor(f"t-{uuid.uuid4().hex}") as transactor:
            transactor.begin()
            transactor.send(Outgoing(topic, b"k", encoded(5), {}, 0))
            transactor.flush()
            assert ids(list(history.rows(DECISIONS))) == ["d0", "d1", "d4"]
            assert history.ends(DECISIONS)[0] < history.log_ends(DECISIONS)[0]
            followed: list[Row] = []

            def all_followed() -> bool:
                followed.extend(follower.poll(0.1))
                return ids(followed) == ["d0", "d1", "d4"]

            poll_until(all_followed)
            assert not follower.poll(0.2)
            transactor.commit({}, None)
        assert [row["id"] for row in follower.catch_up()] in ([], ["d5"])
        await_ids(lambda: ids(list(history.rows(DECISIONS))), ["d0", "d1", "d4", "d5"])


def test_a_stretch_by_time_begins_at_its_first_record(bus: Bus) -> None:
    history = make(bus, DECISIONS)
    topic = history.names[DECISIONS]
    for number in range(4):
        put(bus, topic, number)
        put(bus, topic, 9, abort=True)
    await_ids(lambda: ids(list(history.rows(DECISIONS))), ["d0", "d1", "d2", "d3"])
    rows = list(history.rows(DECISIONS))
    for since in (0, rows[2].raw.timestamp, rows[2].raw.timestamp + 1000, rows[3].raw.timestamp + 10**9):
        for until in (None, rows[3].raw.timestamp):
            found = ids(list(history.rows(DECISIONS, stretch=Stretch(since=since, until=until))))
            late = [row for row in rows if row.raw.timestamp >= since]
            assert found == ids([row for row in late if until is None or row.raw.timestamp < until])
    first = bus.since(topic, rows[2].raw.timestamp)[0]
    assert rows[0].place.offset < first <= rows[2].place.offset or rows[0].raw.timestamp == rows[2].raw.timestamp


def test_what_retention_has_taken_is_left_out() -> None:
    bus = MemoryBus()
    history = make(bus, DECISIONS)
    topic = history.names[DECISIONS]
    for number in range(6):
        put(bus, topic, number)
    places = [row.place for row in history.rows(DECISIONS)]
    bus.delete_before(topic, 0, places[3].offset)
    assert ids(list(history.rows(DECISIONS))) == ["d3", "d4", "d5"]
    assert history.starts(DECISIONS)[0] == places[3].offset
    assert [row and row["id"] for row in history.fetch(DECISIONS, places)] == [None, None, None, "d3", "d4", "d5"]
    assert ids(list(PartitionCursor(history, DECISIONS).rows_on())) == ["d3", "d4", "d5"]


@pytest.mark.slow
@pytest.mark.kafka
def test_what_a_real_broker_has_deleted_is_left_out(broker: str) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    from millrace.infra.log.kafka.bus import KafkaBus

    with KafkaBus(broker) as bus:
        history = make(bus, DECISIONS)
        topic = history.names[DECISIONS]
        for number in range(6):
            put(bus, topic, number)
        await_ids(lambda: ids(list(history.rows(DECISIONS))), [f"d{number}" for number in range(6)])
        places = [row.place for row in history.rows(DECISIONS)]
        admin = AdminClient({"bootstrap.servers": broker})
        for future in admin.delete_records([TopicPartition(topic, 0, places[3].offset)]).values():
            future.result(PATIENCE_S)
        assert ids(list(history.rows(DECISIONS))) == ["d3", "d4", "d5"]
        assert history.starts(DECISIONS)[0] == places[3].offset
        assert [row and row["id"] for row in history.fetch(DECISIONS, places)] == [None, None, None, "d3", "d4", "d5"]
        with Follower(history, [DECISIONS]) as follower:
            assert ids(list(follower.catch_up())) == ["d3", "d4", "d5"]


def test_a_compacted_topic_says_the_newest_of_each_key() -> None:
    bus = MemoryBus()
    history = make(bus, WORKERS)
    topic = history.names[WORKERS]
    with bus.publisher() as publisher:
        for key, value in ((b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"c", b"1"), (b"b", None)):
            publisher.publish(Outgoing(topic, key, value)).result()
    wanted = {b"a": b"2", b"c": b"1"}
    assert {key: record.value for key, record in history.newest_by_key(WORKERS).items()} == wanted
    bus.compact(topic)
    assert {key: record.value for key, record in history.newest_by_key(WORKERS).items()} == wanted


def test_kinds_of_one_policy_only(bus: Bus) -> None:
    assert History(bus, "n", "p").names[RESOLUTIONS] == "n.p.resolutions"
    assert History(bus, "n", "p").names[WEIGHTS] != History(bus, "n", "q").names[WEIGHTS]
