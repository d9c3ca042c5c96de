"""Real learner processes over gloo: they start once, then form groups of any size again and again, as learners do."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from millrace.trainers.backends.torch.backend import TorchBackend
from tests.support import forked

Job = Callable[..., Any]
"""job(backend, rank, world, store, *arguments) -> anything picklable; a function at the top of a module."""


class RankFailed(Exception):
    """A job raised in its process; the message has its traceback."""


def _serve(pipe: Connection, port: int, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)  # of the test, which may have changed since the server of forks began
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    backend = TorchBackend(device="cpu")
    while (order := pickle.loads(pipe.recv_bytes())) is not None:
        job, rank, world, key, arguments = order
        own = PrefixStore(key, store)
        try:
            meet(rank, world, own)
            answer = (True, job(backend, rank, world, own, *arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))  # plain pickle: torch's own would share memory with a process we may kill


class Ranks:
    """A pool of processes. Use as a context manager."""

    def __init__(self, size: int) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = forked.server()
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self._store.port, dict(os.environ)), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)
        self._keys = count()

    def start(self, job: Job, members: Iterable[int], *arguments: Any) -> Store:
        """Begins `job` on the processes `members`, ranks in this order; gives the store they meet in."""
        chosen = list(members)
        key = f"job-{next(self._keys)}"
        for rank, member in enumerate(chosen):
            self._pipes[member].send_bytes(pickle.dumps((job, rank, len(chosen), key, arguments)))
        return PrefixStore(key, self._store)

    def finish(self, member: int, timeout: float = 600.0) -> Any:
        """The result of that process; RankFailed when its job raised. After a TimeoutError the pool is dead."""
        if not self._pipes[member].poll(timeout):
            for process in self.processes:
                process.kill()
            raise TimeoutError(f"process {member} gave no answer")
        good, result = pickle.loads(self._pipes[member].recv_bytes())
        if not good:
            raise RankFailed(result)
        return result

    def run(self, job: Job, world: int, *arguments: Any) -> list[Any]:
        """Results of `job` on the first `world` processes, by rank."""
        self.start(job, range(world), *arguments)
        answers: list[Any] = []
        for member in range(world):
            try:
                answers.append(self.finish(member))
            except RankFailed as failure:
                answers.append(failure)
        failed = [str(answer) for answer in answers if isinstance(answer, RankFailed)]
        if failed:
            raise RankFailed("\n".join(failed))
        return answers

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            with suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def meet(rank: int, world: int, store: Store, where: str = "begin") -> None:
    """Waits until all ranks of a job are `where` this one is; every job begins so. Forming a group gives peers seconds,
    and a first import under load takes longer: a job that imports much before it forms meets once more."""
    store.set(f"{where}/{rank}", b"yes")
    store.wait([f"{where}/{peer}" for peer in range(world)], timedelta(seconds=180))


def descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def gloo_threads() -> int:
    """Threads of this process that belong to gloo groups and stay: none when no group is alive. One that was joined is
    listed until the kernel has come round to it."""
    deadline = time.monotonic() + 10
    while (found := _gloo_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _gloo_threads() -> int:
    found = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended since it was listed
            found += "gloo" in Path(f"/proc/self/task/{task}/comm").read_text()
    return found
