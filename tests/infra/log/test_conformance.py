"""The contract of `millrace.infra.log.base`, which every sibling keeps."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

import pytest

from millrace.infra.errors import FencedError, RefusedError, TooLargeError, TopicError, UnreachableError
from millrace.infra.log.base import EARLIEST, LATEST, Bus, Member, MemberToken, Outgoing, Place, Record, Tail, TopicSpec
from millrace.infra.log.topics import partition_of

Topic = Callable[..., str]
PATIENCE_S = 120.0


def fresh(kind: str = "id") -> str:
    return f"{kind}-{uuid.uuid4().hex[:12]}"


def put(bus: Bus, topic: str, *values: bytes, partition: int | None = 0) -> list[Place]:
    with bus.publisher() as publisher:
        futures = [publisher.publish(Outgoing(topic, b"k", value, partition=partition)) for value in values]
        publisher.flush()
        return [future.result(PATIENCE_S) for future in futures]


def commit(bus: Bus, topic: str, *values: bytes, abort: bool = False) -> None:
    with bus.transactor(fresh()) as transactor:
        transactor.begin()
        for value in values:
            transactor.send(Outgoing(topic, b"k", value, partition=0))
        if abort:
            transactor.flush()
            transactor.abort()
        else:
            transactor.commit({}, None)


def values(records: list[Record]) -> list[bytes | None]:
    return [record.value for record in records]


def poll_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def eventually(bus: Bus, topic: str, count: int) -> list[bytes | None]:
    """The values of a topic once it has that many: a commit is visible soon, not at once."""
    poll_until(lambda: len(list(bus.read(topic, 0))) >= count)
    return values(list(bus.read(topic, 0)))


def gather(reader: Member | Tail, count: int) -> list[Record]:
    """Poll until that many records came, and a little longer to catch what must not come."""
    found: list[Record] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline:
        found += reader.poll(100, 0.05)
    return found + reader.poll(100, 0.05)


def join(member: Member, count: int) -> MemberToken:
    """Poll until the member owns that many partitions."""
    deadline = time.monotonic() + PATIENCE_S
    while len(member.assignment()) != count:
        assert time.monotonic() < deadline, f"owns {member.assignment()}, not {count}"
        assert member.poll(100, 0.05) == []
    return member.token()


# -- records


def test_since_says_from_where_on_a_time_lies(bus: Bus, topic: Topic) -> None:
    name = topic(2)
    put(bus, name, b"0", b"1")
    time.sleep(0.01)
    put(bus, name, b"2")
    records = list(bus.read(name, 0))
    late = records[2].timestamp
    assert bus.since(name, 0) == {0: 0, 1: 0}
    assert bus.since(name, late)[0] == 2
    assert bus.since(name, records[1].timestamp + 1)[0] == 2, "a moment between two records"
    assert bus.since(name, late + 10**9) == bus.log_ends(name)
    with pytest.raises(TopicError):
        bus.since("nowhere", 0)


def test_records_come_back_as_written(bus: Bus, topic: Topic) -> None:
    name = topic(2)
    with bus.publisher() as publisher:
        out = Outgoing(name, b"key", b"value", {"kind": b"x", "empty": b""}, 1)
        place = publisher.publish(out).result(PATIENCE_S)
        publisher.publish(Outgoing(name, b"gone", None, partition=1)).result(PATIENCE_S)
    assert place == Place(name, 1, 0)
    first, second = bus.read(name, 1)
    assert (first.key, first.value, first.place) == (b"key", b"value", place)
    assert dict(first.headers) == {"kind": b"x", "empty": b""}
    assert abs(first.timestamp - time.time() * 1e6) < 600e6
    assert (second.value, dict(second.headers)) == (None, {})


def test_a_key_decides_the_partition(bus: Bus, topic: Topic) -> None:
    name = topic(5)
    keys = [f"tenant/{n}".encode() for n in range(20)]
    with bus.publisher() as publisher:
        places = [publisher.publish(Outgoing(name, key, b"")).result(PATIENCE_S) for key in keys]
    assert [place.partition for place in places] == [partition_of(key, 5) for key in keys]


def test_a_gapless_publisher_writes_nothing_behind_a_record_that_failed(bus: Bus, topic: Topic) -> None:
    name = topic()
    with bus.publisher(gapless=True) as publisher:
        values = (b"0", b"x" * 3_000_000, b"2")
        first, *others = [publisher.publish(Outgoing(name, b"k", value)) for value in values]
        first.result(PATIENCE_S)
        for future in others:
            with pytest.raises(TooLargeError):
                future.result(PATIENCE_S)
    assert [record.value for record in bus.read(name, 0)] == [b"0"]


def test_a_record_too_large_is_said_to_be(bus: Bus, topic: Topic) -> None:
    name = topic()
    with bus.publisher() as publisher, pytest.raises(TooLargeError):
        publisher.publish(Outgoing(name, b"k", b"x" * 3_000_000)).result(PATIENCE_S)
    with bus.transactor(fresh()) as transactor:
        transactor.begin()
        with pytest.raises(TooLargeError):
            transactor.send(Outgoing(name, b"k", b"x" * 3_000_000))


def test_a_missing_topic_is_an_error_everywhere(bus: Bus) -> None:
    name = fresh("missing")
    with pytest.raises(TopicError):
        bus.partitions(name)
    with pytest.raises(TopicError):
        bus.ends(name)
    with pytest.raises(TopicError):
        list(bus.read(name, 0))
    with pytest.raises(TopicError):
        bus.member(fresh(), name)


def test_topics_are_created_once_and_checked(bus: Bus, topic: Topic) -> None:
    name = topic(2, cleanup_policy="compact")
    bus.ensure_topics([TopicSpec(name, 2, {"cleanup.policy": "compact"})])
    with pytest.raises(TopicError, match="2 partitions, not 3"):
        bus.ensure_topics([TopicSpec(name, 3, {"cleanup.policy": "compact"})])
    with pytest.raises(TopicError, match="compact, not delete"):
        bus.check_topics([TopicSpec(name, 2)])
    with pytest.raises(TopicError, match="missing"):
        bus.check_topics([TopicSpec(fresh("missing"), 1)])
    name = topic(1, retention_ms="7200000")
    bus.check_topics([TopicSpec(name, 1), TopicSpec(name, 1, {"retention.ms": "7200000"})])
    with pytest.raises(TopicError, match=f"{name} keeps records 2 h, not for ever"):
        bus.check_topics([TopicSpec(name, 1, {"retention.ms": "-1"})])


def test_topics_are_found_by_how_their_names_begin(bus: Bus, topic: Topic) -> None:
    prefix = f"{fresh()}."
    names = [f"{prefix}b", f"{prefix}a", prefix[:-1]]
    bus.ensure_topics([TopicSpec(name, 1) for name in names])
    assert bus.topics(prefix) == sorted(names[:2])
    assert bus.topics(fresh("none")) == []


# -- transactions and readers


def test_aborted_records_are_holes_and_markers_take_offsets(bus: Bus, topic: Topic) -> None:
    name = topic()
    commit(bus, name, b"a", b"b")
    commit(bus, name, b"x", b"y", abort=True)
    commit(bus, name, b"c")
    assert eventually(bus, name, 3) == [b"a", b"b", b"c"]
    records = list(bus.read(name, 0))
    assert [record.offset for record in records] == [0, 1, 6]
    poll_until(lambda: bus.ends(name) == {0: 8})
    assert bus.starts(name) == {0: 0}


def test_reads_are_bounded(bus: Bus, topic: Topic) -> None:
    name = topic()
    put(bus, name, *(b"%d" % n for n in range(10)))
    assert values(list(bus.read(name, 0, 3, 6))) == [b"3", b"4", b"5"]
    assert values(list(bus.read(name, 0, 8))) == [b"8", b"9"]
    assert list(bus.read(name, 0, 10)) == []
    commit(bus, name, b"x", abort=True)
    poll_until(lambda: bus.ends(name) == {0: 12})
    assert values(list(bus.read(name, 0, 9))) == [b"9"]
    assert list(bus.read(name, 0, 10)) == []


def test_an_open_transaction_hides_itself_and_what_follows(bus: Bus, topic: Topic) -> None:
    name = topic()
    put(bus, name, b"a")
    with bus.transactor(fresh()) as transactor:
        transactor.begin()
        sent = transactor.send(Outgoing(name, b"k", b"b", partition=0))
        transactor.flush()
        assert sent.place == Place(name, 0, 1)
        put(bus, name, b"c")
        assert bus.ends(name) == {0: 1}
        assert bus.log_ends(name) == {0: 3}
        assert not bus.is_settled(name, 0)
        assert values(list(bus.read(name, 0))) == [b"a"]
        assert bus.fetch([Place(name, 0, 1), Place(name, 0, 2)]) == [None, None]
        transactor.commit({}, None)
    assert eventually(bus, name, 3) == [b"a", b"b", b"c"]
    assert bus.is_settled(name, 0)
    assert bus.ends(name) == bus.log_ends(name)


def test_the_place_of_a_record_is_unknown_before_the_flush(bus: Bus, topic: Topic) -> None:
    name = topic()
    with bus.transactor(fresh()) as transactor:
        transactor.begin()
        sent = transactor.send(Outgoing(name, b"k", b"b", partition=0))
        with pytest.raises(RuntimeError, match="flush"):
            _ = sent.place
        transactor.flush()
        assert sent.place.offset == 0
        later = transactor.send(Outgoing(name, b"k", b"c", partition=0))
        transactor.flush()
        assert later.place.offset == 1
        transactor.commit({}, None)


def test_fetch_answers_in_the_order_asked(bus: Bus, topic: Topic) -> None:
    one, two = topic(), topic(2)
    put(bus, one, *(b"%d" % n for n in range(5)))
    commit(bus, one, b"x", abort=True)
    put(bus, two, b"other", partition=1)
    places = [
        Place(one, 0, 4),
        Place(two, 1, 0),
        Place(one, 0, 5),
        Place(one, 0, 0),
        Place(one, 0, 4),
        Place(one, 0, 99),
    ]
    found = bus.fetch(places)
    assert [record and record.value for record in found] == [b"4", b"other", None, b"0", b"4", None]
    assert bus.fetch([]) == []


def test_tails_follow_what_is_committed(bus: Bus, topic: Topic) -> None:
    one, two = topic(), topic()
    put(bus, one, b"a", b"b")
    with bus.tail({(one, 0): 1}) as tail:
        assert values(gather(tail, 1)) == [b"b"]
        commit(bus, one, b"x", abort=True)
        commit(bus, one, b"c")
        assert values(gather(tail, 1)) == [b"c"]
        put(bus, two, b"d")
        tail.add(two, 0, EARLIEST)
        assert values(gather(tail, 1)) == [b"d"]
        assert tail.positions().keys() == {(one, 0), (two, 0)}
        assert tail.positions()[one, 0] in (5, 6)  # the marker at 5 may have been passed
        assert tail.positions()[two, 0] == 1
        tail.seek(one, 0, 0)
        assert values(gather(tail, 3)) == [b"a", b"b", b"c"]
    with bus.tail({(one, 0): LATEST}) as tail:
        put(bus, one, b"e")
        assert values(gather(tail, 1)) == [b"e"]


def test_a_reader_behind_the_end_of_a_log_that_was_cut_is_told(bus: Bus, topic: Topic) -> None:
    name = topic()
    put(bus, name, b"a", b"b")
    with bus.tail({(name, 0): 2}) as tail:
        assert tail.poll(1, 0) == []
    with bus.tail({(name, 0): 7}) as tail, pytest.raises(TopicError, match="nothing lies at"):
        gather(tail, 1)


# -- fences


def test_a_new_owner_fences_the_old_one_and_settles_what_it_left(bus: Bus, topic: Topic) -> None:
    name, owner = topic(), fresh()
    old = bus.transactor(owner)
    old.begin()
    old.send(Outgoing(name, b"k", b"in doubt", partition=0))
    old.flush()
    new = bus.transactor(owner)
    assert list(bus.read(name, 0)) == []
    new.begin()
    new.send(Outgoing(name, b"k", b"new", partition=0))
    new.commit({}, None)
    with pytest.raises(FencedError):
        old.commit({}, None)
    old.close()
    new.begin()
    new.send(Outgoing(name, b"k", b"newer", partition=0))
    new.commit({}, None)
    new.close()
    assert eventually(bus, name, 2) == [b"new", b"newer"]


def test_an_idle_owner_that_was_fenced_cannot_write_again(bus: Bus, topic: Topic) -> None:
    name, owner = topic(), fresh()
    with bus.transactor(owner) as old, bus.transactor(owner):

        def attempt() -> None:
            old.begin()
            old.send(Outgoing(name, b"k", b"late", partition=0))
            old.flush()
            old.commit({}, None)

        with pytest.raises(FencedError):
            attempt()
    assert list(bus.read(name, 0)) == []


def test_offsets_are_committed_with_the_records(bus: Bus, topic: Topic) -> None:
    source, sink, group = topic(2), topic(), fresh("group")
    put(bus, source, b"a", b"b")
    with bus.member(group, source) as member, bus.transactor(fresh()) as transactor:
        records: list[Record] = []
        while len(records) < 2:
            records += member.poll(10, 0.05)
        assert member.committed_offsets({0, 1}) == {}
        transactor.begin()
        transactor.send(Outgoing(sink, b"k", b"out", partition=0))
        transactor.commit({(source, 0): 2}, member.token())
        assert member.committed_offsets({0, 1}) == {0: 2}
        transactor.begin()
        transactor.send(Outgoing(sink, b"k", b"undone", partition=0))
        transactor.abort()
        assert member.committed_offsets({0}) == {0: 2}
    assert eventually(bus, sink, 1) == [b"out"]


def test_offsets_need_a_member(bus: Bus, topic: Topic) -> None:
    name = topic()
    with bus.transactor(fresh()) as transactor:
        transactor.begin()
        with pytest.raises(ValueError, match="token"):
            transactor.commit({(name, 0): 1}, None)


def test_a_member_that_never_joined_has_no_token(bus: Bus, topic: Topic) -> None:
    with bus.member(fresh("group"), topic()) as member, pytest.raises(RefusedError):
        member.token()


def test_a_token_from_before_a_join_is_refused_and_the_transactor_lives_on(bus: Bus, topic: Topic) -> None:
    source, sink, group = topic(2), topic(), fresh("group")
    with bus.member(group, source) as first, bus.transactor(fresh()) as transactor:
        old = join(first, 2)
        with bus.member(group, source) as second:
            settle([first, second], [1, 1])
            transactor.begin()
            transactor.send(Outgoing(sink, b"k", b"stale", partition=0))
            with pytest.raises(RefusedError):
                transactor.commit({(source, 0): 1}, old)
            deadline = time.monotonic() + PATIENCE_S
            while True:  # a cooperative join takes two generations, and the second may still be on its way
                first.poll(1, 0.1)
                second.poll(1, 0.1)
                transactor.begin()
                transactor.send(Outgoing(sink, b"k", b"current", partition=0))
                try:
                    transactor.commit({(source, 0): 1}, first.token())
                    break
                except RefusedError:
                    assert time.monotonic() < deadline
    assert eventually(bus, sink, 1) == [b"current"]


def test_the_token_of_a_member_that_left_is_refused(bus: Bus, topic: Topic) -> None:
    source, group = topic(), fresh("group")
    with bus.member(group, source) as member:
        token = join(member, 1)
    with bus.transactor(fresh()) as transactor:
        transactor.begin()
        with pytest.raises(RefusedError):
            transactor.commit({(source, 0): 1}, token)


def test_offsets_in_doubt_are_not_answered(bus: Bus, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink, group, owner = topic(), topic(), fresh("group"), fresh()
    with bus.member(group, source) as member:
        token = join(member, 1)
        dying = bus.transactor(owner)
        dying.begin()
        dying.send(Outgoing(sink, b"k", b"in doubt", partition=0))

        def die(name: str) -> None:
            if name == "transactor.after_offsets":
                raise KeyboardInterrupt

        monkeypatch.setattr("millrace.infra.faults._hook", die)
        with pytest.raises(KeyboardInterrupt):
            dying.commit({(source, 0): 7}, token)
        monkeypatch.setattr("millrace.infra.faults._hook", None)
        with pytest.raises(UnreachableError):
            member.committed_offsets({0})
        bus.transactor(owner).close()
        assert member.committed_offsets({0}) == {}
        dying.close()


# -- groups


def settle(members: list[Member], counts: list[int]) -> None:
    """Poll all members until they own that many partitions each."""
    deadline = time.monotonic() + PATIENCE_S
    while [len(member.assignment()) for member in members] != counts:
        assert time.monotonic() < deadline, [member.assignment() for member in members]
        for member in members:
            member.poll(100, 0.02)


def test_partitions_are_shared_and_taken_over(bus: Bus, topic: Topic) -> None:
    name, group = topic(4), fresh("group")
    seen: list[tuple[str, set[int]]] = []

    def follow(who: str) -> dict[str, Callable[[set[int]], None]]:
        return {
            "on_assign": lambda gained: seen.append((f"{who} gains", gained)),
            "on_revoke": lambda lost: seen.append((f"{who} loses", lost)),
        }

    first = bus.member(group, name, client_id="first", **follow("first"))  # type: ignore[arg-type]
    join(first, 4)
    assert seen == [("first gains", {0, 1, 2, 3})]
    second = bus.member(group, name, client_id="second", **follow("second"))  # type: ignore[arg-type]
    settle([first, second], [2, 2])
    assert first.assignment() | second.assignment() == {0, 1, 2, 3}
    assert ("second gains", second.assignment()) in seen
    assert ("first loses", second.assignment()) in seen
    rows = {row.client_id: {p for _, p in row.partitions} for row in bus.group(group).members}
    assert rows == {"first": first.assignment(), "second": second.assignment()}
    first.close()
    settle([second], [4])
    assert bus.group(group).stable
    second.close()
    assert bus.group(group).members == ()


def test_a_member_goes_on_where_the_group_committed(bus: Bus, topic: Topic) -> None:
    source, group = topic(), fresh("group")
    put(bus, source, b"a", b"b", b"c")
    with bus.member(group, source) as member, bus.transactor(fresh()) as transactor:
        assert values(gather(member, 3)) == [b"a", b"b", b"c"]
        transactor.begin()
        transactor.commit({(source, 0): 2}, member.token())
    with bus.member(group, source) as member:
        assert values(gather(member, 1)) == [b"c"]


def test_whoever_is_assigned_may_say_where_to_begin(bus: Bus, topic: Topic) -> None:
    source = topic(2)
    put(bus, source, b"a", b"b")
    put(bus, source, b"x", partition=1)
    with bus.member(fresh("group"), source, on_assign=lambda gained: {0: 1, 1: LATEST}) as member:
        assert values(gather(member, 1)) == [b"b"]
        member.seek(1, EARLIEST)
        member.seek(0, 0)
        assert sorted(values(gather(member, 3)), key=str) == [b"a", b"b", b"x"]


def test_seeking_inside_the_first_poll_after_the_assignment(bus: Bus, topic: Topic) -> None:
    source = topic()
    put(bus, source, b"a", b"b", b"c")
    with bus.member(fresh("group"), source, on_assign=lambda gained: dict.fromkeys(gained, LATEST)) as member:
        join(member, 1)
        member.seek(0, 1)
        assert values(gather(member, 2)) == [b"b", b"c"]


def test_paused_partitions_stay_owned(bus: Bus, topic: Topic) -> None:
    source = topic(2)
    put(bus, source, b"a")
    put(bus, source, b"x", partition=1)
    with bus.member(fresh("group"), source, on_assign=lambda gained: dict.fromkeys(gained, LATEST)) as member:
        join(member, 2)
        member.pause({0})
        member.seek(0, 0)
        member.seek(1, 0)
        assert values(gather(member, 1)) == [b"x"]
        assert member.assignment() == {0, 1}
        member.resume({0})
        assert values(gather(member, 1)) == [b"a"]


def test_an_expelled_member_comes_back_as_another(bus: Bus, topic: Topic) -> None:
    name, group = topic(2), fresh("group")
    lost: list[set[int]] = []
    with bus.member(group, name, client_id="c", on_revoke=lost.append) as member:
        token = join(member, 2)
        (row,) = bus.group(group).members
        assert row.member_id == token.member_id
        assert bus.expel(group, token.member_id)
        assert not bus.expel(group, token.member_id)
        deadline = time.monotonic() + PATIENCE_S
        while not lost or len(member.assignment()) != 2:
            assert time.monotonic() < deadline
            member.poll(10, 0.05)
        assert member.token().member_id != token.member_id


def test_a_waiting_reader_wakes_when_something_comes(bus: Bus, topic: Topic) -> None:
    name = topic()
    with bus.tail({(name, 0): 0}) as tail:
        tail.poll(1, 0.2)
        writer = threading.Timer(0.2, lambda: put(bus, name, b"a"))
        writer.start()
        found = tail.poll(10, PATIENCE_S)
        writer.join()
    assert values(found) == [b"a"]
