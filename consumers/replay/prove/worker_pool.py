"""The processes that train again: started once, formed anew for each stretch of steps with the same ranks.

Invariants: ranks form a group only when all of them are ready for it; when one fails or dies, the others are ended,
since they would wait for it; nothing is left running when the block ends.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from millrace.consumers.replay.prove import rank_process
from millrace.consumers.replay.prove.rank_process import Failure
from millrace.consumers.replay.prove.rank_worker import RankLayout, RankWorker
from millrace.consumers.replay.prove.step_folder import TrainedStep
from millrace.infra.config import Settings
from millrace.infra.errors import ProofError
from millrace.infra.process.net import LOCALHOST
from millrace.trainers.backends.group import open_store

PATIENCE_S = 30.0
"""of the store that ranks meet in"""
END_S = 5.0

Answer = TypeVar("Answer")


class WorkerPool:
    """At most `size` ranks. Use as a context."""

    def __init__(self, size: int, settings: Settings, context: BaseContext | None = None) -> None:
        self._store = open_store(LOCALHOST, PATIENCE_S)
        self._keys = count()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._is_ready = False
        self._settings: Settings | None = None
        self._world = 0
        """ranks that form a group"""
        start = context or multiprocessing.get_context("spawn")
        for _ in range(size):
            here, there = start.Pipe()
            process = start.Process(target=rank_process.serve, args=(there, settings), daemon=True)  # type: ignore[attr-defined]
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def form(self, settings: Settings, world: int, start: Path, digest: str) -> RankLayout:
        """Make `world` ranks with the trainer of `settings` hold the version in `start`. Raises ProofError."""
        self._leave()
        if not self._is_ready:
            self._answers(len(self._pipes))
            self._is_ready = True
        if self._settings != settings:
            self._settings = settings
            self._order([partial(RankWorker.prepare, settings=settings)] * len(self._pipes))
        group = partial(RankWorker.form, world=world, port=self._store.port, key=f"stretch-{next(self._keys)}")
        layouts = self._order([partial(group, rank=rank, start=start, digest=digest) for rank in range(world)])
        self._world = world
        return layouts[0]

    def train(self, folder: Path, root: Path, batch_folder: Path | None = None) -> TrainedStep:
        """The step in `folder` of the ranks that form a group; rank 0's answer. Raises ProofError."""
        return self._order(
            [partial(RankWorker.train, folder=folder, root=root, batch_folder=batch_folder)] * self._world
        )[0]

    def _leave(self) -> None:
        world, self._world = self._world, 0
        self._order([partial(RankWorker.leave)] * world)

    def _order(self, orders: Sequence[partial[Answer]]) -> list[Answer]:
        """What the first ranks answer, each to its order."""
        for pipe, order in zip(self._pipes, orders, strict=False):
            try:
                pipe.send(order)
            except OSError:
                break  # it died: what it does not answer says so
        answers: list[Answer] = self._answers(len(orders))
        return answers

    def _answers(self, number: int) -> list[Any]:
        """What the first `number` ranks answer."""
        answers: dict[int, Any] = {}
        while len(answers) < number:
            ranks = [rank for rank in range(number) if rank not in answers]
            speaking = wait([self._pipes[rank] for rank in ranks])
            answers |= {rank: self._answer(rank) for rank in ranks if self._pipes[rank] in speaking}
        return [answers[rank] for rank in range(number)]

    def _answer(self, rank: int) -> Any:
        try:
            answer = self._pipes[rank].recv()
        except (EOFError, OSError):
            self._end()
            self._processes[rank].join(END_S)
            raise ProofError(
                f"the process of rank {rank} died (exit code {self._processes[rank].exitcode}): if it ran out of "
                "memory, prove on a machine with as much as the learners had"
            ) from None
        if isinstance(answer, Failure):
            self._end()
            if answer.is_meant:
                raise ProofError(f"rank {rank}: {answer.text}")
            raise RuntimeError(f"rank {rank} failed:\n{answer.text}")
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
