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
class Group:
    """A ready group: its place in the order, its tokens (all lineages), and the rank that owns its partition, if one
    does."""

    seq: int
    tokens: int
    owner: int | None = None


def minibatches(groups: Sequence[Group], count: int) -> list[list[Group]]:
    """At most `count` minibatches of whole groups, contiguous in seq, near equal in number of groups; none is empty."""
    ordered = sorted(groups, key=lambda group: group.seq)
    count = max(1, min(count, len(ordered)))
    bounds = [len(ordered) * i // count for i in range(count + 1)]
    return [ordered[lo:hi] for lo, hi in pairwise(bounds)]


def allocate(groups: Sequence[Group], ranks: int) -> list[list[Group]]:
    """One list of groups a rank, in seq order, balanced by tokens, preferring owners.

    No rank's load exceeds SLACK times the mean plus the largest group, and none is empty when len(groups) >= ranks.
    """
    shares: list[list[Group]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    fair = SLACK * sum(group.tokens for group in groups) / ranks
    for group in sorted(groups, key=lambda group: (-group.tokens, group.seq)):
        lightest = min(range(ranks), key=lambda rank: (loads[rank], len(shares[rank]), rank))
        owner = group.owner
        rank = owner if owner is not None and 0 <= owner < ranks and loads[owner] + group.tokens <= fair else lightest
        shares[rank].append(group)
        loads[rank] += group.tokens
    for rank in range(ranks):
        if not shares[rank] and len(groups) >= ranks:
            donor = max(range(ranks), key=lambda other: (len(shares[other]), -other))
            shares[rank].append(shares[donor].pop())  # the last one placed is the donor's smallest
    return [sorted(share, key=lambda group: group.seq) for share in shares]


def plan(groups: Sequence[Group], ranks: int, count: int) -> list[list[list[int]]]:
    """plan[minibatch][rank] = seqs. The manifest of a step: what every rank computes and when."""
    return [
        [[group.seq for group in share] for share in allocate(minibatch, ranks)]
        for minibatch in minibatches(groups, count)
    ]
