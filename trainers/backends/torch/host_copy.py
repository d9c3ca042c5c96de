"""Copies of tensors in main memory, made beside what is computed next.

    tensors are      their copies are made                   before the tensors change
    on a GPU         by a stream of its own, into pinned     the computing stream waits for the copies; this thread
                     memory                                  goes on
    in main memory   by a thread                             this thread waits for it

Invariants: a copy holds what its tensor held when the copy began, if nobody writes to the tensor before `guard`; nobody
reads a copy before `wait`; the tensors' memory stays theirs until their copies are whole.

Copies take as many bytes of main memory as the tensors (torch rounds each pinned one up to a power of two, and keeps
pinned memory for the next copies once these are gone). A learner has two sets at most: one that is written as a
version, and one of the step after it. Where no more memory can be pinned, copies are pageable, which is slower and
makes this thread wait.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

log = logging.getLogger("millrace.host_copy")


class HostCopy:
    """Begins to copy `tensors`. `copies`: theirs, in order, with equal shapes and dtypes, whole after `wait`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors: Sequence[torch.Tensor] = tensors
        self.copies = [host_memory(tensor) for tensor in tensors]
        pairs = list(zip(self.copies, tensors, strict=True))
        self._event = _by_stream([pair for pair in pairs if pair[1].is_cuda])
        self._thread = _by_thread([pair for pair in pairs if not pair[1].is_cuda])

    def guard(self) -> None:
        """Before the first write to the tensors, from the thread that computes: what it computes after this comes after
        the copies."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        if self._thread is not None:
            self._thread.result()

    def wait(self) -> None:
        """Returns once the copies are whole. From any thread."""
        if self._event is not None:
            self._event.synchronize()
        if self._thread is not None:
            self._thread.result()
        self._tensors = ()


def host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Empty, of a tensor's shape and dtype, in main memory; pinned for a tensor of a GPU, if that can be had."""
    if tensor.is_cuda:
        try:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        except RuntimeError:
            _say_pageable()
    return torch.empty(tensor.shape, dtype=tensor.dtype)


@functools.cache
def _say_pageable() -> None:
    """Once a process: a model has hundreds of tensors."""
    log.warning(
        "no more memory can be pinned: the step waits for copies; weights and moments should fit twice in main memory"
    )


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(copy, tensor)"""


def _by_stream(pairs: Pairs) -> torch.cuda.Event | None:
    """Enqueues the copies behind what is computed so far. The event after them."""
    if not pairs:
        return None
    stream = torch.cuda.Stream(pairs[0][1].device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for copy, tensor in pairs:
            copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return event


def _by_thread(pairs: Pairs) -> Future[None] | None:
    if not pairs:
        return None

    def run() -> None:
        for copy, tensor in pairs:
            copy.copy_(tensor)

    thread = ThreadPoolExecutor(1, thread_name_prefix="host-copy")
    future = thread.submit(run)
    thread.shutdown(wait=False)
    return future
