from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.learner.group.agreement import Need, address, agree, client_id, is_covered
from millrace.infra.log.base import GroupMember, GroupView, MemberToken

TOPIC = "ns.p.trajectories"


def member(name: str, *partitions: int) -> GroupMember:
    client = client_id(f"learner/{name}", "127.0.0.1", 4000 + len(name))
    return GroupMember(name, client, "/127.0.0.1", frozenset((TOPIC, p) for p in partitions))


def view(*members: GroupMember, stable: bool = True) -> GroupView:
    return GroupView(stable, members)


def test_ranks_follow_the_lowest_partition_whatever_the_order_of_the_table() -> None:
    table = [member("b", 2, 3), member("a", 0, 1), member("ccc")]
    roster = agree(view(*table), MemberToken("g", 7, "b"), {2, 3}, TOPIC, 4)
    assert roster is not None
    assert [peer.member_id for peer in roster.peers] == ["a", "b"]
    assert (roster.rank, roster.world, roster.generation) == (1, 2, 7)
    assert roster.leader.member_id == "a"
    assert roster.leader.port == 4001
    assert [roster.owner(p) for p in range(4)] == [0, 0, 1, 1]
    other = agree(view(*reversed(table)), MemberToken("g", 7, "a"), {0, 1}, TOPIC, 4)
    assert other is not None
    assert other.key == roster.key


@pytest.mark.parametrize(
    ("table", "token", "own"),
    [
        (view(member("a", 0, 1, 2, 3), stable=False), MemberToken("g", 1, "a"), {0, 1, 2, 3}),
        (view(member("a", 0, 1, 2)), MemberToken("g", 1, "a"), {0, 1, 2}),
        (view(member("a", 0, 1, 2, 3)), MemberToken("g", -1, "a"), {0, 1, 2, 3}),
        (view(member("a", 0, 1, 2, 3)), MemberToken("g", 1, "a"), {0, 1}),
        (view(member("a", 0, 1), member("b", 1, 2, 3)), MemberToken("g", 1, "a"), {0, 1}),
        (view(member("a", 0, 1, 2, 3)), MemberToken("g", 1, "gone"), {0}),
        (view(member("a", 0, 1, 2, 3), member("b")), MemberToken("g", 1, "b"), set()),
    ],
    ids=["rebalancing", "uncovered", "never joined", "own differs", "owned twice", "not in it", "standby"],
)
def test_no_roster_while(table: GroupView, token: MemberToken, own: set[int]) -> None:
    assert agree(table, token, own, TOPIC, 4) is None


def test_a_key_belongs_to_one_generation_of_one_table() -> None:
    keys = {
        agree(view(*table), MemberToken("g", generation, "a"), set(own), TOPIC, 4).key  # type: ignore[union-attr]
        for generation in (1, 2)
        for own, table in (
            ({0, 1}, [member("a", 0, 1), member("b", 2, 3)]),
            ({0, 1}, [member("a", 0, 1), member("c", 2, 3)]),
            ({0}, [member("a", 0), member("b", 1, 2, 3)]),
        )
    }
    assert len(keys) == 6


def test_a_table_of_other_topics_covers_nothing() -> None:
    other = GroupMember("a", "x@h:1", "h", frozenset(("ns.other", p) for p in range(4)))
    assert not is_covered(view(other), TOPIC, 4)


NEEDS = st.builds(
    lambda unit, serving, cells: Need(unit, serving, unit * cells),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.integers(0, 4),
    st.integers(0, 3),
)


@given(st.integers(1, 12), NEEDS, st.randoms(use_true_random=False))
def test_whole_cells_train_beside_those_that_serve_and_the_rest_wait(members: int, need: Need, draw: Random) -> None:
    """Every member reads the same from the same table, in whatever order it comes."""
    cuts = sorted(draw.sample(range(1, 24), members - 1))
    table = [member(f"m{at}", *range(low, high)) for at, (low, high) in enumerate(pairwise([0, *cuts, 24]))]
    rosters = []
    for one in table:
        draw.shuffle(others := list(table))
        own = {partition for _, partition in one.partitions}
        rosters.append(agree(view(*others), MemberToken("g", 3, one.member_id), own, TOPIC, 24, need))
    found = [roster for roster in rosters if roster is not None]
    assert [roster.self_peer.member_id for roster in found] == [one.member_id for one in table]
    assert len({(roster.key, roster.peers, roster.spares) for roster in found}) == 1
    cells = need.limit // need.unit or members
    whole = [need.serving + count * need.unit for count in range(1, cells + 1)]
    assert found[0].world == max((n for n in whole if n <= members), default=0)
    assert [roster.trains for roster in found] == [rank < found[0].world for rank in range(members)]
    assert [peer.member_id for peer in found[0].members] == [one.member_id for one in table]
    ranks = {found[0].owner(partition) for partition in range(24)} - {None}
    assert ranks == set(range(found[0].world))


@given(st.text("abc/-@:", max_size=8), st.integers(1, 65535))
def test_the_address_survives_any_name(name: str, port: int) -> None:
    assert address(client_id(name, "10.0.0.7", port)) == ("10.0.0.7", port)
