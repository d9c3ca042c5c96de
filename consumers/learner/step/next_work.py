"""What the ranks do next, decided by rank 0 alone at a boundary and told to all as one message.

Invariants: a member leaves a formed group only by an order that all have read (or by closing its sockets); a
rebalance or a stop is seen before new work is begun. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from millrace.consumers.learner.group.agreement import Roster
from millrace.consumers.learner.version.order import Batch
from millrace.schemas.records import Resolution
from millrace.trainers.batches.allocation import ReadyGroup, plan


class PlacedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A ready group to train on: its seq, its id and the places (topic, partition, offset) of its samples."""

    seq: int
    group: str
    places: list[tuple[str, int, int]]


class Train(msgspec.Struct, frozen=True, tag=True):
    """Train version `version` into the next. `minibatches`: seqs of the whole batch in training order; `shares[cell]`:
    the groups that each rank of a cell fetches; `oldest`: tokens of an older version are masked, when the release
    policy says so."""

    version: int
    seq_lo: int
    seq_hi: int
    minibatches: list[list[int]]
    shares: list[list[PlacedGroup]]
    oldest: int | None


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Nothing to train on yet."""


class Regroup(msgspec.Struct, frozen=True, tag=True):
    """Tear down together and form again."""

    reason: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Tear down together and end."""

    reason: str


NextWork: TypeAlias = Train | Wait | Regroup | Stop

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[NextWork] = msgspec.msgpack.Decoder(NextWork)


def encode(work: NextWork) -> bytes:
    """The message."""
    return _encoder.encode(work)


def decode(data: bytes) -> NextWork:
    """What a message orders."""
    return _decoder.decode(data)


def interrupt(*, has_moved: bool, stopping: int, world: int, failure: str | None, is_done: bool) -> NextWork | None:
    """What must happen before any new work, if anything.

    has_moved: some rank saw the group change; stopping: ranks that were asked to stop; failure: why rank 0's last
    commit did not happen; is_done: the last wanted version is committed."""
    if is_done:
        return Stop("the last wanted version is committed")
    if stopping == world:
        return Stop("asked to stop")
    if failure is not None:
        return Regroup(failure)
    if has_moved:
        return Regroup("the group changed")
    if stopping:
        return Regroup(f"{stopping} of {world} ranks were asked to stop")
    return None


def manifest(
    batch: Batch, roster: Roster, cells: Sequence[int], version: int, minibatches: int, oldest: int | None
) -> Train:
    """Who trains on what of a batch: balanced by tokens, preferring the cell of the rank that owns a group's partition.

    cells: by rank, below 0 where a rank serves a role and trains no share."""
    many = max(cells) + 1
    groups = [
        ReadyGroup(
            seq=_seq(resolution["seq"]),
            tokens=sum(resolution["tokens"]),
            owner=_owner(resolution, roster, cells),
        )
        for resolution in batch.groups
    ]
    parts = {
        _seq(resolution["seq"]): PlacedGroup(
            _seq(resolution["seq"]),
            resolution["group"],
            [(place["topic"], place["partition"], place["offset"]) for place in resolution["trajectories"]],
        )
        for resolution in batch.groups
    }
    layout = plan(groups, many, minibatches)
    shares = [[parts[seq] for minibatch in layout for seq in minibatch[cell]] for cell in range(many)]
    return Train(
        version=version,
        seq_lo=batch.seq_lo,
        seq_hi=batch.seq_hi,
        minibatches=[sorted(seq for share in minibatch for seq in share) for minibatch in layout],
        shares=shares,
        oldest=oldest,
    )


def cells_of(train: Train) -> dict[int, int]:
    """Which cell each group of a batch was given to, by seq."""
    return {part.seq: cell for cell, share in enumerate(train.shares) for part in share}


def _owner(resolution: Resolution, roster: Roster, cells: Sequence[int]) -> int | None:
    """The cell of the rank that owns the partition of a group, where it is in one."""
    if not resolution["trajectories"]:
        return None
    rank = roster.owner(resolution["trajectories"][0]["partition"])
    return None if rank is None or cells[rank] < 0 else cells[rank]


def _seq(seq: int | None) -> int:
    assert seq is not None, "a batch holds ready groups"
    return seq


def lost_codes(train: Train, losses: Mapping[int, int]) -> list[int]:
    """One number a group of the batch, 0 or the code of why this rank could not read it."""
    return [losses.get(seq, 0) for seq in range(train.seq_lo, train.seq_hi)]
