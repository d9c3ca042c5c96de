"""What a step learns from: candidates as items, each a sample, a group or a pair. Pure.

    singles   every candidate alone
    best      the one of each group with the highest reward, unless that is the lowest of the whole selection
    groups    all of a group, where its rewards differ
    pairs     best and worst of a group, then the next best and the next worst, as long as their rewards differ

Invariants: a place is in one item at most; equal candidates in another order give the same items but for their order;
items keep the order in which their groups first appear; every candidate is in an item or is counted under a reason.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from millrace.consumers.replay.selection import BranchCandidate
from millrace.infra.log.base import Place

LACKS_REWARD = "it has no reward of those chosen"
WORSE = "another of its group is as good or better"
LOWEST = "the best of its group is no better than the worst of the selection"
EQUAL_REWARDS = "no reward of its group differs from another"
NO_PARTNER = "no other of its group is left to pair it with"


@dataclass(frozen=True, slots=True)
class BranchItem:
    """Members that are learned from together. group: their id in the log; rewards: one a place, None where a method
    reads none; texts: replies of theirs that are learned from as text; digests: one a place, the digest of what these
    are written as, empty where there are none, none at all where a former release kept none."""

    group: str
    places: tuple[Place, ...]
    rewards: tuple[float | None, ...]
    tokens: int
    texts: int = 0
    digests: tuple[str, ...] = ()


@dataclass(slots=True)
class BranchItems:
    """Items, and why candidates are in none."""

    items: list[BranchItem]
    left_out: Counter[str]

    @property
    def places(self) -> list[Place]:
        return [place for item in self.items for place in item.places]


Shape = Callable[[Sequence[BranchCandidate]], BranchItems]


def digest(places: Sequence[Place]) -> str:
    """sha256 hex over the places in their order, each as the line `topic/partition@offset`."""
    out = hashlib.sha256()
    for place in places:
        out.update(f"{place.topic}/{place.partition}@{place.offset}\n".encode())
    return out.hexdigest()


def singles(candidates: Sequence[BranchCandidate]) -> BranchItems:
    return BranchItems([_item([one]) for one in candidates], Counter())


def best(candidates: Sequence[BranchCandidate]) -> BranchItems:
    items = BranchItems([], Counter())
    member = _groups(candidates, items.left_out)
    rewards = [one.reward or 0.0 for members in member.values() for one in members]
    for members in member.values():
        if members[0].reward == min(rewards) < max(rewards):  # of failures alone, the best is no example
            _count(items.left_out, LOWEST, len(members))
            continue
        items.items.append(_item(members[:1]))
        _count(items.left_out, WORSE, len(members) - 1)
    return items


def groups(candidates: Sequence[BranchCandidate]) -> BranchItems:
    items = BranchItems([], Counter())
    for members in _groups(candidates, items.left_out).values():
        if members[0].reward == members[-1].reward:
            _count(items.left_out, EQUAL_REWARDS, len(members))
        else:
            items.items.append(_item(members))
    return items


def pairs(candidates: Sequence[BranchCandidate]) -> BranchItems:
    items = BranchItems([], Counter())
    for members in _groups(candidates, items.left_out).values():
        rest = members
        while len(rest) > 1 and rest[0].reward != rest[-1].reward:
            items.items.append(_item([rest[0], rest[-1]]))
            rest = rest[1:-1]
        _count(items.left_out, EQUAL_REWARDS if len(rest) > 1 else NO_PARTNER, len(rest))
    return items


def _groups(
    candidates: Sequence[BranchCandidate], left_out: Counter[str]
) -> Mapping[tuple[str, str], list[BranchCandidate]]:
    """Members by tenant and group, best first; of equal ones the lower sample first."""
    by_group: dict[tuple[str, str], list[BranchCandidate]] = {}
    for one in candidates:
        if one.reward is None or not math.isfinite(one.reward):
            _count(left_out, LACKS_REWARD, 1)
        else:
            by_group.setdefault((one.tenant, one.group), []).append(one)
    return {key: sorted(members, key=_rank) for key, members in by_group.items()}


def _rank(one: BranchCandidate) -> tuple[float, int, str, Place]:
    return -(one.reward or 0.0), one.sample, one.id, one.place


def _item(members: Sequence[BranchCandidate]) -> BranchItem:
    places, rewards = zip(*((one.place, one.reward) for one in members), strict=True)
    tokens, texts = sum(one.tokens for one in members), sum(one.texts for one in members)
    return BranchItem(members[0].group, places, rewards, tokens, texts, tuple(one.digest for one in members))


def _count(left_out: Counter[str], reason: str, count: int) -> None:
    if count:
        left_out[reason] += count
