"""Where a model's tensors are between its uses: away from the device, each use fetching them back.

    device   host copy
    cuda     pinned host memory, kept from use to use
    cpu      a scratch file without a name, since host memory is the device; it lies in the directory for temporary
             files (TMPDIR), which must be on a disk for this to save memory

Invariants: the bytes that come back are those that went; a tensor keeps its identity and its views, only its storage is
emptied and filled again, so optimizers and FSDP's units need not know; the file has no name, so a killed process leaves
none behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from millrace.trainers.errors import BadConfiguration

GRAIN = mmap.ALLOCATIONGRANULARITY


@dataclass(frozen=True, slots=True)
class _TensorCopy:
    """A storage of `size` bytes, and where its copy is: pinned memory, or from byte `at` of the file on."""

    storage: torch.UntypedStorage
    size: int
    at: int
    pinned: torch.Tensor | None


class TensorShelf:
    """Keeps one model's tensors while nobody uses them. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._file = None if device.type == "cuda" else self._scratch()
        self._copies: list[_TensorCopy] = []
        self._away = False

    def _scratch(self) -> int:
        """The descriptor of a file that ends with this shelf."""
        file, name = tempfile.mkstemp(prefix="millrace-idle-")
        os.unlink(name)
        weakref.finalize(self, os.close, file)
        return file

    @property
    def size(self) -> int:
        """Bytes that it keeps."""
        return sum(copy.size for copy in self._copies)

    def put(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies the storages of `tensors` and frees them. Those of an earlier `put` are forgotten."""
        self._copies, at = [], 0
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        for storage in storages.values():
            size = storage.nbytes()
            if size == 0:
                continue
            pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True) if self._file is None else None
            self._copies.append(_TensorCopy(storage, size, at, pinned))
            at += -(-size // GRAIN) * GRAIN
        if self._file is not None:
            os.ftruncate(self._file, at)
        for copy in self._copies:
            self._copy(copy, out=True)
        self.put_back()

    def put_back(self) -> None:
        """Frees what `fetch` brought, whose bytes nobody changed."""
        for copy in self._copies:
            copy.storage.resize_(0)
        self._away = True
        if self._file is not None:
            _trim()

    def fetch(self) -> None:
        """Brings the tensors back, if they are away."""
        if not self._away:
            return
        for copy in self._copies:
            copy.storage.resize_(copy.size)
            self._copy(copy, out=False)
        self._away = False

    def _copy(self, copy: _TensorCopy, *, out: bool) -> None:
        here = torch.empty(0, dtype=torch.uint8, device=self._device).set_(copy.storage)
        if self._file is None:
            assert copy.pinned is not None
            (copy.pinned.copy_(here) if out else here.copy_(copy.pinned))
            return
        with mmap.mmap(self._file, copy.size, offset=copy.at) as view:
            there = torch.frombuffer(view, dtype=torch.uint8)
            (there.copy_(here) if out else here.copy_(there))
            del there


def check_roles(roles: Sequence[str], choices: Sequence[str]) -> None:
    """BadConfiguration for what is no role."""
    for role in roles:
        if role not in choices:
            raise BadConfiguration(f"offload: no role {role}: choose {', '.join(choices)}")


def _trim() -> None:
    """Gives freed pages back to the system, where the C library keeps them else."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
