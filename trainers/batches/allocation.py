"""Which group trains in which minibatch and on which rank. Pure and deterministic: every rank computes the same answer.

Invariants: groups are never split; each group is in exactly one minibatch and on exactly one rank; minibatches do not
depend on the number of ranks, so another layout makes the same optimizer steps; a rank has a share whenever there are
as many groups as ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SLACK = 1.1
"""How far above the mean load a rank may go to keep groups that it owns (its broker connection has them prefetched)."""


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A ready group: its place in the order, its tokens (all lineages), and the rank that owns its partition, if one
    does."""

    seq: int
    tokens: int
    owner: int | None = None


def minibatches(groups: Sequence[ReadyGroup], count: int) -> list[list[ReadyGroup]]:
    """At most `count` minibatches of whole groups, contiguous in seq, near equal in number of groups; none is empty."""
    in_order = sorted(groups, key=lambda group: group.seq)
    count = max(1, min(count, len(in_order)))
    bounds = [len(in_order) * i // count for i in range(count + 1)]
    return [in_order[lo:hi] for lo, hi in pairwise(bounds)]


def allocate(groups: Sequence[ReadyGroup], ranks: int, earlier: Sequence[int] = ()) -> list[list[ReadyGroup]]:
    """One list of groups a rank, in seq order, balanced by tokens, preferring owners.

    No rank's load exceeds SLACK times the mean plus the largest group; none is empty when len(groups) >= ranks. With
    fewer groups than ranks, those with the least `earlier` (tokens by rank, from earlier minibatches) come first.
    """
    shares: list[list[ReadyGroup]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    before = list(earlier) or [0] * ranks
    fair = SLACK * sum(group.tokens for group in groups) / ranks
    for group in sorted(groups, key=lambda group: (-group.tokens, group.seq)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], len(shares[rank]), before[rank], rank))
        owner = group.owner
        if owner is not None and 0 <= owner < ranks <= len(groups) and loads[owner] + group.tokens <= fair:
            rank = owner
        shares[rank].append(group)
        loads[rank] += group.tokens
    for rank in range(ranks):
        if not shares[rank] and len(groups) >= ranks:
            donor = max(range(ranks), key=lambda other: (len(shares[other]), -other))
            shares[rank].append(shares[donor].pop())  # the last one placed is the donor's smallest
    return [sorted(share, key=lambda group: group.seq) for share in shares]


def plan(groups: Sequence[ReadyGroup], ranks: int, count: int) -> list[list[list[int]]]:
    """plan[minibatch][rank] = seqs. The manifest of a step: what every rank computes and when.

    Every rank has a share of the batch when there are as many groups as ranks, however small the minibatches are.
    """
    earlier = [0] * ranks
    manifest = []
    for minibatch in minibatches(groups, count):
        shares = allocate(minibatch, ranks, earlier)
        earlier = [before + sum(g.tokens for g in share) for before, share in zip(earlier, shares, strict=True)]
        manifest.append([[group.seq for group in share] for share in shares])
    return manifest
