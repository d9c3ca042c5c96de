"""The process group of a backend: the one place where it forms, is aborted and is left.

Invariants: after `leave` no socket of the group is open, even if a reference to it survives somewhere, and nothing
that torch keeps binds what comes next to it; a group that could not form leaves nothing behind. No exception object,
work handle or traceback is kept, since any of them would hold the group.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from millrace.trainers.backends.sockets import GroupSockets
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.phase_clock import COLLECTIVES, Clock
from millrace.trainers.private_apis.process_groups import (
    HashStore,
    TCPStore,
    forget_meshes,
    limit_waits,
    reset_group_count,
)

FORM_S = 10.0
"""longest that ranks wait for each other to form, all of them being on their way: one of them may have died since"""


class RankGroup:
    """The ranks of one backend, over gloo and, on CUDA, NCCL. Not thread-safe, except `abort`."""

    def __init__(self, clock: Clock, *, cuda: bool) -> None:
        self.rank, self.world, self.formed = 0, 1, False
        self._clock, self._cuda = clock, cuda
        self._sockets: GroupSockets | None = None

    def join(
        self,
        rank: int,
        world: int,
        store: Store | None,
        timeout: float,
        within: Callable[[timedelta], None] | None = None,
    ) -> None:
        """Meets the others in `store`; a world of 1 needs none. No collective waits longer than `timeout` seconds.
        `within` makes the groups inside this one, given the longest wait meanwhile. BadConfiguration for an impossible
        rank."""
        check(rank, world, store)
        sockets = GroupSockets()
        meet = HashStore() if store is None else store
        forming = timedelta(seconds=min(timeout, FORM_S))
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self._cuda else "gloo", store=meet, rank=rank, world_size=world, timeout=forming
            )
            if within is not None:
                within(forming)
            limit_waits(timedelta(seconds=timeout))
            sockets.record(PrefixStore("millrace", meet), rank, world)
        except BaseException:
            if dist.is_initialized():
                dist.destroy_process_group()
            reset_group_count()
            raise
        self._sockets = sockets
        self.rank, self.world, self.formed = rank, world, True

    def abort(self) -> None:
        """Makes a collective that blocks in this process fail now. From any thread."""
        sockets = self._sockets
        if sockets is not None:
            sockets.close()

    def leave(self) -> None:
        """Closes the sockets and ends the group. At any time, any number of times. Models that lived in it are garbage
        by now."""
        self.abort()
        self._sockets = None
        if self.formed:
            if dist.is_initialized():
                dist.destroy_process_group()
                forget_meshes()
            collect()
        self.rank, self.world, self.formed = 0, 1, False

    def sum(self, values: Sequence[float], over: dist.ProcessGroup | None = None) -> list[float]:
        """Adds each value up over the ranks (of the group inside this one, if given), in float64."""
        return self._reduce(values, dist.ReduceOp.SUM, over)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX, None)

    def announce(self, message: bytes | None) -> bytes:
        """Rank 0's message on every rank; the others give None."""
        if self.world == 1:
            return message or b""
        with self._clock.phase(COLLECTIVES):
            return broadcast_bytes(message, partial(dist.broadcast, src=0))

    def _reduce(
        self, values: Sequence[float], op: dist.ReduceOp.RedOpType, over: dist.ProcessGroup | None
    ) -> list[float]:
        vector = torch.tensor(values, dtype=torch.float64)
        if (self.world if over is None else over.size()) > 1 and len(values) > 0:
            with self._clock.phase(COLLECTIVES):
                dist.all_reduce(vector, op=op, group=over)
        return [float(value) for value in vector]


def check(rank: int, world: int, store: Store | None) -> None:
    """BadConfiguration where `rank` of `world` cannot form."""
    if not 0 <= rank < world:
        raise BadConfiguration(f"rank {rank} is not in a world of {world}")
    if world > 1 and store is None:
        raise BadConfiguration(f"{world} ranks need a store to meet in")


def broadcast_bytes(message: bytes | None, broadcast: Callable[[torch.Tensor], object]) -> bytes:
    """The message of the one rank that has one, on all ranks. `broadcast` overwrites a tensor with that rank's."""
    size = torch.tensor([len(message or b"")])
    broadcast(size)
    data = (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if message
        else torch.empty(int(size), dtype=torch.uint8)
    )
    if int(size):
        broadcast(data)
    return bytes(data.numpy().tobytes())


def collect() -> None:
    """Frees the models of a group that ended."""
    gc.collect()
    if not gc.get_freeze_count():
        # What lives now (imported modules above all) outlives every group. Without it in the way, collecting takes
        # milliseconds instead of tenths of a second in later tear-downs, and each recovery has one.
        gc.freeze()


def open_store(host: str, timeout_s: float) -> TCPStore:
    """A store in this process, on a free port of `host` and no other address (torch alone would bind to all). Waiting
    for a key ends after `timeout_s`."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
