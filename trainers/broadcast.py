"""One weight file over a process group: rank 0 has it, every other rank gets it, bit for bit.

A group is formed for one transfer and dropped after it, so whoever dies in the middle leaves nothing behind. The data
plane is gloo, into the memory of the host, whatever the receiver computes on.

Invariants: `receive` returns only bytes whose sha256 is the one that was asked for; no rank waits for another longer
than `timeout_s` at a time; only the address that is named is listened on."""

from __future__ import annotations

import hashlib
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import BroadcastOptions, ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore

from trainers.errors import CorruptCheckpoint
from trainers.tensorfile import Slot, open_file, slots

CHUNK = 64 << 20
"""bytes of one broadcast"""
DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
DTYPES |= {"I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
DTYPES |= {"F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def listen(host: str, timeout_s: float) -> TCPStore:
    """The store at which one group meets, on a free port of `host` and no other address."""
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


def send(store: TCPStore, host: str, ranks: int, path: Path, timeout_s: float) -> None:
    """Give the tensors of the safetensors file `path` to ranks 1 to `ranks`. Blocks until all have them. Raises
    RuntimeError when one does not come or goes, CorruptCheckpoint when the file is not whole."""
    file = open_file(path)
    group = _group(store, host, 0, ranks + 1, timeout_s)
    body: Any = np.memmap(path, np.uint8, "r")[len(file.header) :]
    for begin in range(0, body.size, CHUNK):
        _broadcast(group, torch.from_numpy(np.array(body[begin : begin + CHUNK])))


def receive(
    host: str, port: int, rank: int, ranks: int, header: bytes, digest: str, timeout_s: float
) -> dict[str, torch.Tensor]:
    """The tensors that rank 0, whose store listens at host:port, sends to `ranks` others, in file order, on the CPU.

    header: the file's first bytes; digest: sha256 hex of the whole file. Raises CorruptCheckpoint when other bytes
    came, RuntimeError when the sender goes."""
    found = slots(header)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    group = _group(store, _address_towards(host, port), rank, ranks + 1, timeout_s)
    body = torch.empty(found[-1].end if found else 0, dtype=torch.uint8)
    seen = hashlib.sha256(header)
    for begin in range(0, body.numel(), CHUNK):
        part = body[begin : begin + CHUNK]
        _broadcast(group, part)
        seen.update(part.numpy().data)
    if seen.hexdigest() != digest:
        raise CorruptCheckpoint("what was broadcast is not the version that was announced: its sha256 differs")
    return {slot.name: _typed(body[slot.begin : slot.end], slot) for slot in found}


def _typed(part: torch.Tensor, slot: Slot) -> torch.Tensor:
    dtype = DTYPES[slot.dtype]
    return (part.clone() if slot.begin % dtype.itemsize else part).view(dtype).reshape(slot.shape)


def _group(store: TCPStore, host: str, rank: int, world: int, timeout_s: float) -> Any:
    gloo: Any = ProcessGroupGloo  # torch's stubs know little of it
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(PrefixStore("weights", store), rank, world, options)


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


def _address_towards(host: str, port: int) -> str:
    """Our own address as `host` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
