"""Tensors between ranks of one world, beside the process groups that their backends form among some of them.

It runs over gloo on every device: what crosses it (samples, log-probabilities, values, gathered states) is in host
memory at both ends, so NCCL would add a copy to the device and one back.

Invariants: tensors travel as they are, nothing is pickled; after `leave` no socket of it is open; nobody waits longer
than the timeout, nor for a rank whose sockets are closed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from millrace.trainers.backends.group import FORM_S, broadcast_bytes
from millrace.trainers.backends.sockets import GroupSockets
from millrace.trainers.phase_clock import COLLECTIVES, Clock
from millrace.trainers.private_apis.process_groups import gloo_group

DTYPES = (torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8)


class Bridge:
    """All ranks of a world call `sum`, `max`, `tell` and `announce` together. Not thread-safe, except `abort`."""

    def __init__(self, rank: int, world: int, store: Store, timeout: float, clock: Clock) -> None:
        """Meets the others in `store`; no wait after that is longer than `timeout` seconds."""
        self._clock = clock
        self._sockets = GroupSockets()
        forming = timedelta(seconds=min(timeout, FORM_S))
        self._timeout = timedelta(seconds=timeout)
        bytes_store, operations = PrefixStore("bridge", store), PrefixStore("bridge-ops", store)
        self._group: dist.ProcessGroup | None = gloo_group(rank, world, bytes_store, operations, forming, self._timeout)
        self._sockets.record(PrefixStore("bridge-sockets", store), rank, world)

    @property
    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("the bridge was left")
        return self._group

    def abort(self) -> None:
        """Makes whoever waits on this rank, and this rank's own waits, fail now. From any thread."""
        self._sockets.close()

    def leave(self) -> None:
        """Closes the sockets and forgets the group."""
        self.abort()
        self._group = None

    def sum(self, values: Sequence[float]) -> list[float]:
        """Adds each value up over the ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        vector = torch.tensor(values, dtype=torch.float64)
        if len(values) > 0:
            with self._clock.phase(COLLECTIVES):
                self._open.allreduce([vector], op, self._timeout).wait()
        return [float(value) for value in vector]

    def tell(self, values: Sequence[float], root: int) -> list[float]:
        """The values of rank `root` on every rank; the others give as many of any kind."""
        vector = torch.tensor(values, dtype=torch.float64)
        with self._clock.phase(COLLECTIVES):
            self._open.broadcast(vector, root, self._timeout).wait()
        return [float(value) for value in vector]

    def announce(self, message: bytes | None) -> bytes:
        """Rank 0's message on every rank; the others give None."""
        with self._clock.phase(COLLECTIVES):
            return broadcast_bytes(message, lambda tensor: self._open.broadcast(tensor, 0, self._timeout).wait())

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        """Host tensors of DTYPES to one rank, which calls `receive`."""
        head = [len(tensors)]
        for tensor in tensors:
            head += [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        with self._clock.phase(COLLECTIVES):
            self._put(torch.tensor([len(head)]), to)
            self._put(torch.tensor(head), to)
            if flat:
                self._put(torch.cat(flat), to)

    def receive(self, at: int) -> list[torch.Tensor]:
        """What rank `at` sends."""
        with self._clock.phase(COLLECTIVES):
            size = self._take(torch.zeros(1, dtype=torch.int64), at)
            head = iter(self._take(torch.zeros(int(size), dtype=torch.int64), at).tolist())
            shapes = []
            for _ in range(next(head)):
                dtype = DTYPES[next(head)]
                shapes.append((dtype, [next(head) for _ in range(next(head))]))
            sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
            data = torch.empty(sum(sizes), dtype=torch.uint8)
            if sum(sizes):
                self._take(data, at)
        parts = data.split(sizes)
        # a part may begin where its dtype must not, so each gets memory of its own
        return [part.clone().view(dtype).reshape(shape) for part, (dtype, shape) in zip(parts, shapes, strict=True)]

    def _put(self, tensor: torch.Tensor, to: int) -> None:
        self._open.send([tensor], to, 0).wait()

    def _take(self, tensor: torch.Tensor, at: int) -> torch.Tensor:
        self._open.recv([tensor], at, 0).wait()
        return tensor
