from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.batches.allocation import SLACK, ReadyGroup, allocate, minibatches, plan

GROUPS = st.lists(st.tuples(st.integers(1, 500), st.none() | st.integers(0, 5)), min_size=1, max_size=30).map(
    lambda rows: [ReadyGroup(100 + seq, tokens, owner) for seq, (tokens, owner) in enumerate(rows)]
)


@given(GROUPS, st.integers(1, 6))
def test_each_group_goes_to_one_rank_and_loads_are_balanced(groups: list[ReadyGroup], ranks: int) -> None:
    shares = allocate(groups, ranks)
    assert sorted(g.seq for share in shares for g in share) == [g.seq for g in groups]
    mean, largest = sum(g.tokens for g in groups) / ranks, max(g.tokens for g in groups)
    assert max(sum(g.tokens for g in share) for share in shares) <= SLACK * mean + largest
    if len(groups) >= ranks:
        assert all(shares)


@given(GROUPS, st.integers(1, 6), st.integers(1, 4), st.randoms())
def test_plans_are_the_same_whatever_order_groups_arrive_in(
    groups: list[ReadyGroup], ranks: int, count: int, random: object
) -> None:
    shuffled = list(groups)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan(shuffled, ranks, count) == plan(groups, ranks, count)


@given(GROUPS, st.integers(1, 6), st.integers(1, 4))
def test_every_rank_has_a_share_of_the_batch(groups: list[ReadyGroup], ranks: int, count: int) -> None:
    shares = [[seq for minibatch in plan(groups, ranks, count) for seq in minibatch[rank]] for rank in range(ranks)]
    if len(groups) >= ranks:
        assert all(shares)


@given(GROUPS, st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_minibatches_do_not_depend_on_ranks(groups: list[ReadyGroup], count: int, some: int, others: int) -> None:
    def seqs(ranks: int) -> list[set[int]]:
        return [{seq for share in minibatch for seq in share} for minibatch in plan(groups, ranks, count)]

    assert seqs(some) == seqs(others)
    assert len(minibatches(groups, count)) == min(count, len(groups))


def test_owners_keep_their_groups_when_that_is_fair() -> None:
    groups = [ReadyGroup(seq, 10, owner=seq % 2) for seq in range(8)]
    for rank, share in enumerate(allocate(groups, 2)):
        assert [g.seq % 2 for g in share] == [rank] * 4


def test_an_owner_of_everything_shares() -> None:
    shares = allocate([ReadyGroup(seq, 10, owner=0) for seq in range(9)], 3)
    assert [len(share) for share in shares] == [3, 3, 3]
