"""In which order the ranks of a pipeline work on micro-batches. Pure: lists of actions, one a rank.

    gpipe         all forward passes, then all backward passes
    1f1b          as few forward passes ahead as keep all ranks busy, then one backward pass for each forward
    interleaved   the same with several chunks of layers a rank (stage = chunk * ranks + rank): shorter bubbles, more
                  messages; micro-batches come in multiples of the ranks

Invariants: every rank does each pass of each of its chunks once; where messages wait in a queue, no order blocks; the
order of backward passes through a stage is that of the micro-batches, so gradients add up alike under every schedule.
"""

from __future__ import annotations

from typing import NamedTuple

from millrace.trainers.errors import BadConfiguration

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved"
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)


class Action(NamedTuple):
    """One pass of a micro-batch through a chunk of this rank."""

    backward: bool
    chunk: int
    micro: int


def chunks_of(schedule: str) -> int:
    """Chunks of layers that a rank has. BadConfiguration for an unknown schedule."""
    if schedule not in SCHEDULES:
        raise BadConfiguration(f"no pipeline schedule {schedule}: choose {', '.join(SCHEDULES)}")
    return 2 if schedule == INTERLEAVED else 1


def actions(schedule: str, ranks: int, rank: int, micros: int) -> list[Action]:
    """What `rank` does in a step of `micros` micro-batches."""
    chunks = chunks_of(schedule)
    if chunks > 1 and micros % ranks:
        raise BadConfiguration(f"{micros} micro-batches do not interleave on {ranks} ranks; fill them up")
    total = micros * chunks
    forwards = [Action(False, *_turn(index, ranks, chunks)) for index in range(total)]
    backwards = [Action(True, chunks - 1 - chunk, micro) for _, chunk, micro in forwards]
    ahead = min(total, _warm_up(schedule, ranks, rank, chunks, total))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[total - ahead :]


def forwards(chunks: int, micros: int) -> list[Action]:
    """What every rank does to pass `micros` micro-batches through without a way back."""
    return [Action(False, chunk, micro) for chunk in range(chunks) for micro in range(micros)]


def _turn(index: int, ranks: int, chunks: int) -> tuple[int, int]:
    """(chunk, micro) of the index-th forward pass: as many micro-batches as there are ranks through one chunk, then
    the same ones through the next."""
    if chunks == 1:
        return 0, index
    turn, within = divmod(index, ranks * chunks)
    return within // ranks, turn * ranks + within % ranks


def _warm_up(schedule: str, ranks: int, rank: int, chunks: int, total: int) -> int:
    if schedule == GPIPE:
        return total
    if chunks == 1:
        return ranks - 1 - rank
    return (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
