"""One weight file over a process group: rank 0 has it, every other rank gets it, bit for bit.

A group is formed for one transfer and dropped after it, so whoever dies in the middle leaves nothing behind. The data
plane is gloo, into the memory of the host, whatever the receiver computes on.

Invariants: `receive` returns only bytes whose sha256 is the one that was asked for; no rank waits for another longer
than `timeout_s` at a time, and a sender that is gone is noticed at once; only the address that is named is listened on.

`fault` is called with the name of each point at which the death of either end must be harmless: `joining`,
`between_pieces`, `after_last`."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import BroadcastOptions
from torch.distributed.distributed_c10d import PrefixStore

from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.private_apis.process_groups import TCPStore, gloo_at
from millrace.trainers.weights.tensorfile import TensorSlot, open_file, slots

CONNECT_S = 5.0
"""longest wait for the connection to a store that listens; torch asks a dead one again for up to three times as long"""
PIECE = 64 << 20
"""most bytes of one broadcast"""
DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
DTYPES |= {"I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
DTYPES |= {"F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}

Fault = Callable[[str], None]


def _no_fault(_: str) -> None:
    """The default fault point: nothing happens."""


def send(store: TCPStore, host: str, ranks: int, path: Path, timeout_s: float, *, fault: Fault = _no_fault) -> None:
    """Give the tensors of the safetensors file `path` to ranks 1 to `ranks`. Blocks until all have them. Raises
    RuntimeError when one does not come or goes, CorruptCheckpoint when the file is not whole."""
    file = open_file(path)
    body: Any = np.memmap(path, np.uint8, "r")[len(file.header) :]
    fault("joining")
    group = gloo_at(host, 0, ranks + 1, PrefixStore("weights", store), timedelta(seconds=timeout_s))
    for begin, end in pieces(body.size):
        if begin:
            fault("between_pieces")
        _broadcast(group, torch.from_numpy(np.array(body[begin:end])))
    fault("after_last")


def receive(
    host: str,
    port: int,
    rank: int,
    ranks: int,
    header: bytes,
    digest: str,
    timeout_s: float,
    *,
    fault: Fault = _no_fault,
) -> dict[str, torch.Tensor]:
    """The tensors that rank 0, whose store listens at host:port, sends to `ranks` others, in file order, on the CPU.

    header: the file's first bytes; digest: sha256 hex of the whole file. Raises CorruptCheckpoint when other bytes
    came, RuntimeError when the sender goes."""
    tensors = slots(header)
    address = _address_towards(host, port, timeout_s)
    fault("joining")
    patience = timedelta(seconds=min(timeout_s, CONNECT_S))
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
    store.set_timeout(timedelta(seconds=timeout_s))
    group = gloo_at(address, rank, ranks + 1, PrefixStore("weights", store), timedelta(seconds=timeout_s))
    body = torch.empty(tensors[-1].end if tensors else 0, dtype=torch.uint8)
    hasher = hashlib.sha256(header)
    for begin, end in pieces(body.numel()):
        if begin:
            fault("between_pieces")
        part = body[begin:end]
        _broadcast(group, part)
        hasher.update(part.numpy().data)
    fault("after_last")
    if hasher.hexdigest() != digest:
        raise CorruptCheckpoint("what was broadcast is not the version that was announced: its sha256 differs")
    return {slot.name: _as_dtype(body[slot.begin : slot.end], slot) for slot in tensors}


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of each broadcast of `size` bytes: two or more, so that every transfer has a middle."""
    step = max(1, min(PIECE, -(-size // 2)))
    for begin in range(0, size, step):
        yield begin, min(begin + step, size)


def _as_dtype(part: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    dtype = DTYPES[slot.dtype]
    return (part.clone() if slot.begin % dtype.itemsize else part).view(dtype).reshape(slot.shape)


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


def _address_towards(host: str, port: int, timeout_s: float) -> str:
    """Our own address as host:port sees it. Raises RuntimeError when nobody listens there: torch's store would go on
    asking until its timeout."""
    try:
        with socket.create_connection((host, port), timeout_s) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RuntimeError(f"the sender at {host}:{port} is gone ({error})") from error
