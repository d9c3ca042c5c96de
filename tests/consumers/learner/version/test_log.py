from __future__ import annotations

from typing import Any

from millrace.consumers.learner.version.log import Frontier


def places(*offsets: int, partition: int = 0) -> list[dict[str, Any]]:
    return [{"topic": "t", "partition": partition, "offset": offset} for offset in offsets]


def completion(group: str, rows: list[dict[str, Any]], kind: str = "complete") -> Any:
    return {"kind": kind, "group": group, "trajectories": rows}


def resolution(group: str, rows: list[dict[str, Any]], seq: int | None) -> Any:
    return {"kind": "stale" if seq is None else "ready", "group": group, "trajectories": rows, "seq": seq}


def test_a_group_that_is_sealed_but_not_decided_holds_its_partition() -> None:
    it = Frontier()
    it.complete(completion("a", places(1, 2)))
    it.complete(completion("b", places(4, 5)))
    it.complete(completion("c", places(3, partition=1)))
    it.resolve(resolution("b", places(4, 5), 0))
    it.resolve(resolution("c", places(3, partition=1), 1))
    assert it.offsets(0) == {0: 1, 1: 3}
    assert it.offsets(2) == {0: 1, 1: 4}
    it.commit(2)
    it.resolve(resolution("a", places(1, 2), None))
    assert it.offsets(2) == {0: 6, 1: 4}


def test_ready_groups_of_later_batches_hold_too() -> None:
    it = Frontier()
    for seq in range(4):
        it.complete(completion(f"g{seq}", places(10 * seq)))
        it.resolve(resolution(f"g{seq}", places(10 * seq), seq))
    assert [it.offsets(seq)[0] for seq in range(5)] == [0, 10, 20, 30, 31]


def test_a_new_leader_comes_to_the_same_offsets_from_the_start() -> None:
    records = [(completion(f"g{s}", places(s)), resolution(f"g{s}", places(s), s)) for s in range(6)]
    old, new = Frontier(), Frontier()
    new.commit(4)
    for one, two in records:
        old.complete(one)
        old.resolve(two)
    for one, _ in records:
        new.complete(one)
    for _, two in records:
        new.resolve(two)
    old.commit(4)
    assert old.offsets(4) == new.offsets(4) == {0: 4}


def test_a_group_that_expired_before_it_was_sealed_holds_nothing() -> None:
    it = Frontier()
    it.resolve(resolution("late", [], None))
    it.complete(completion("late", places(7)))
    it.complete(completion("", [], kind="progress"))
    it.resolve({**resolution("", [], None), "kind": "setting"})
    assert it.offsets(0) == {0: 8}


def test_a_top_up_is_replaced_by_the_whole_group() -> None:
    it = Frontier()
    it.complete(completion("a", places(1), kind="top_up"))
    it.complete(completion("a", places(1, 9)))
    it.resolve(resolution("a", places(1, 9), 0))
    assert it.offsets(1) == {0: 10}
