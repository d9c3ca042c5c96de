"""Candidates as samples, groups and pairs."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.replay.branch import items, selection_file
from millrace.consumers.replay.branch.items import BranchItem, BranchItems, Shape
from millrace.consumers.replay.selection import BranchCandidate
from millrace.infra.errors import BranchError
from millrace.infra.log.base import Place

SHAPES = [items.singles, items.best, items.groups, items.pairs]
REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]))


@st.composite
def candidates(draw: st.DrawFn) -> list[BranchCandidate]:
    found = draw(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), REWARDS), max_size=24))
    return [
        BranchCandidate(Place("t", 0, at), f"id-{at}", "a", tenant, f"group-{group}", at, 5, reward)
        for at, (tenant, group, reward) in enumerate(found)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@given(candidates())
def test_every_candidate_is_in_one_item_or_is_counted(shape: Shape, some: list[BranchCandidate]) -> None:
    made = shape(some)
    assert len(made.places) == len(set(made.places))
    assert len(made.places) + sum(made.left_out.values()) == len(some)
    owner = {one.place: (one.tenant, one.group) for one in some}
    assert all(len({owner[place] for place in item.places}) == 1 for item in made.items)


@pytest.mark.parametrize("shape", SHAPES)
@given(candidates(), st.randoms())
def test_the_order_of_candidates_decides_the_order_of_items_alone(
    shape: Shape, some: list[BranchCandidate], r: random.Random
) -> None:
    def sets(made: BranchItems) -> set[BranchItem]:
        return set(made.items)

    first = sets(shape(some))
    r.shuffle(some)
    assert sets(shape(some)) == first


@given(candidates())
def test_the_best_is_the_best_and_failures_alone_are_no_example(some: list[BranchCandidate]) -> None:
    known = [one for one in some if one.reward is not None]
    rewards: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in known:
        rewards[one.tenant, one.group].append(one.reward or 0.0)
    worst = min((one.reward or 0.0 for one in known), default=0.0)
    best = max((one.reward or 0.0 for one in known), default=0.0)
    wanted = sorted(max(each) for each in rewards.values() if max(each) > worst or worst == best)
    assert sorted(item.rewards[0] or 0.0 for item in items.best(some).items) == wanted


@given(candidates())
def test_pairs_are_better_first_and_groups_differ(some: list[BranchCandidate]) -> None:
    for item in items.pairs(some).items:
        better, worse = item.rewards
        assert better is not None
        assert worse is not None
        assert better > worse
    assert all(len(set(item.rewards)) > 1 for item in items.groups(some).items)


def test_a_larger_group_is_cut_into_its_best_and_worst() -> None:
    some = [
        BranchCandidate(Place("t", 0, n), str(n), "a", "l", "g", n, 5, r)
        for n, r in enumerate((0.1, 0.9, 0.5, 0.4, 0.5))
    ]
    made = items.pairs(some)
    assert [item.rewards for item in made.items] == [(0.9, 0.1), (0.5, 0.4)]
    assert made.left_out == {items.NO_PARTNER: 1}


def test_a_kept_selection_is_read_as_it_was_and_a_changed_one_refused(tmp_path: Path) -> None:
    made = [BranchItem("g", (Place("t", 0, 1), Place("t", 1, 2)), (1.0, None), 9, 2, ("ab", "cd"))]
    now = datetime(2026, 5, 4, 3, 2, 1, 7)
    digest = selection_file.write(tmp_path, made, now)
    assert selection_file.read(tmp_path) == selection_file.KeptItems(made, digest, as_of=now)
    selection_file.write(tmp_path, made, now, "math", "v2")
    assert selection_file.read(tmp_path) == selection_file.KeptItems(made, digest, "math", "v2", now)
    file = tmp_path / selection_file.FILE
    file.write_bytes(file.read_bytes().replace(b'"t",1,2', b'"t",1,3'))
    with pytest.raises(BranchError, match="was changed"):
        selection_file.read(tmp_path)
    file.unlink()
    with pytest.raises(BranchError, match="cannot be read"):
        selection_file.read(tmp_path)
