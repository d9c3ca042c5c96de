"""The processes that train again: started once, formed anew for each stretch of steps with the same ranks.

Invariants: ranks form a group only when all of them are ready for it; when one fails or dies, the others are ended,
since they would wait for it; nothing is left running when the block ends.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from millrace.consumers.replay.orders import (
    Answer,
    Done,
    Failed,
    Formed,
    FormGroup,
    Leave,
    Order,
    Prepare,
    TrainedStep,
    TrainStep,
)
from millrace.consumers.replay.rank_process import serve
from millrace.infra.config import Settings
from millrace.infra.errors import ProofError
from millrace.trainers.backends.group import open_store

HERE = "127.0.0.1"
PATIENCE_S = 30.0
"""of the store that ranks meet in"""
END_S = 5.0

Kind = TypeVar("Kind", Formed, TrainedStep, Done)


class WorkerPool:
    """At most `size` ranks. Use as a context."""

    def __init__(self, size: int, settings: Settings, context: BaseContext | None = None) -> None:
        self._store = open_store(HERE, PATIENCE_S)
        self._keys = count()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._ready = 0
        self._settings: Settings | None = None
        self._formed = 0
        made = context or multiprocessing.get_context("spawn")
        for _ in range(size):
            here, there = made.Pipe()
            process = made.Process(target=serve, args=(there, settings), daemon=True)  # type: ignore[attr-defined]
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def form(self, settings: Settings, world: int, start: Path, digest: str) -> Formed:
        """Make `world` ranks with the trainer of `settings` hold the version in `start`. Raises ProofError."""
        self._leave()
        if not self._ready:
            self._answers(Done, len(self._pipes))
            self._ready = len(self._pipes)
        if self._settings != settings:
            self._settings = settings
            self._ask(Done, [Prepare(settings)] * len(self._pipes))
        key = f"stretch-{next(self._keys)}"
        orders = [FormGroup(rank, world, self._store.port, key, start, digest) for rank in range(world)]
        formed = self._ask(Formed, orders)
        self._formed = world
        return formed[0]

    def train(self, material: Path, root: Path, packed: Path | None = None) -> TrainedStep:
        """One step of the ranks that are formed; rank 0's answer. Raises ProofError."""
        return self._ask(TrainedStep, [TrainStep(material, root, packed)] * self._formed)[0]

    def _leave(self) -> None:
        formed, self._formed = self._formed, 0
        self._ask(Done, [Leave()] * formed)

    def _ask(self, kind: type[Kind], orders: Sequence[Order]) -> list[Kind]:
        for pipe, order in zip(self._pipes, orders, strict=False):
            try:
                pipe.send(order)
            except OSError:
                break  # it died: what it does not answer says so
        return self._answers(kind, len(orders))

    def _answers(self, kind: type[Kind], number: int) -> list[Kind]:
        """What the first `number` ranks answer."""
        found: dict[int, Kind] = {}
        while len(found) < number:
            waiting = [rank for rank in range(number) if rank not in found]
            there = wait([self._pipes[rank] for rank in waiting])
            for rank in waiting:
                if self._pipes[rank] in there:
                    found[rank] = self._answer(kind, rank)
        return [found[rank] for rank in range(number)]

    def _answer(self, kind: type[Kind], rank: int) -> Kind:
        try:
            answer: Answer = self._pipes[rank].recv()
        except (EOFError, OSError):
            self._end()
            self._processes[rank].join(END_S)
            raise ProofError(
                f"the process of rank {rank} died (exit code {self._processes[rank].exitcode}): if it ran out of "
                "memory, prove on a machine with as much as the learners had"
            ) from None
        if isinstance(answer, Failed):
            self._end()
            if answer.meant:
                raise ProofError(f"rank {rank}: {answer.text}")
            raise RuntimeError(f"rank {rank} failed:\n{answer.text}")
        assert isinstance(answer, kind), answer
        return answer

    def _end(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()
        for process in self._processes:
            process.join(END_S)
        self._end()
        for process in self._processes:
            process.join()
