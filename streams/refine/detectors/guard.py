"""Detectors in a process of their own, so that a native crash or an endless match costs one event, not the stage.

Invariants: a scan ends with hits or with DetectorError, and no step of it (handing the text over, waiting, reading the
hits) waits for longer than the timeout, also where the process stands still in the middle of one; after an error the
next scan gets a fresh process; the process ends when this one does, however this one ends (its pipe closes)."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import msgspec

from millrace.infra.errors import DetectorError
from millrace.streams.refine.detectors.base import Detector, Hit

START_S = 120.0
"""compiling every rule from cold takes seconds, more on a busy machine"""
_NO_HITS = b""
"""the answer for most texts"""
_dump = msgspec.msgpack.Encoder().encode
_load = msgspec.msgpack.Decoder(list[tuple[int, int, str, str, bool]] | str).decode


class GuardedDetectors(Detector):
    """Runs detectors, named `module:Class`, one after the other in a child process. Not for use by several threads."""

    name = "guarded"

    def __init__(self, detectors: Sequence[str], timeout_s: float = 20.0) -> None:
        """Starts the process. Raises DetectorError when a detector cannot be made at all."""
        self._names = tuple(detectors)
        self._timeout = timeout_s
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._version = self._start()

    def version(self) -> str:
        return self._version

    def scan(self, text: bytes) -> list[Hit]:
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(text)
            answer = self._pipe.recv_bytes()
        except BlockingIOError:
            self.close()
            raise DetectorError(f"no answer of the detectors within {self._timeout:g} s") from None
        except (EOFError, OSError) as error:
            self.close()
            raise DetectorError("the detectors' process died") from error
        if answer == _NO_HITS:
            return []
        hits = _load(answer)
        if isinstance(hits, str):
            raise DetectorError(hits)
        return [Hit(*hit) for hit in hits]

    def close(self) -> None:
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.kill()
            process.join()

    def _start(self) -> str:
        context = multiprocessing.get_context("spawn")
        near_end, far_end = context.Pipe()
        process = context.Process(target=serve, args=(far_end, self._names), daemon=True, name="detectors")
        process.start()
        far_end.close()
        self._process, self._pipe = process, near_end
        try:
            if not near_end.poll(START_S):
                raise DetectorError(f"the detectors did not start within {START_S:g} s")
            version: str = near_end.recv()
            _limit(near_end, self._timeout)
        except (EOFError, DetectorError) as error:
            self.close()
            raise DetectorError(
                f"the detectors {', '.join(self._names)} did not start: run one alone to see why"
            ) from error
        return version


def _limit(pipe: Connection, timeout_s: float) -> None:
    """Let every read and write of a pipe end with BlockingIOError after so long. The system keeps the time, so that a
    scan costs no call for it."""
    seconds, part = divmod(timeout_s, 1)
    limit = struct.pack("@ll", int(seconds), int(part * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as sock:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, limit)


def make(name: str) -> Detector:
    """The detector that `module:Class` names."""
    module, _, kind = name.partition(":")
    detector: Detector = getattr(importlib.import_module(module), kind)()
    return detector


def serve(pipe: Connection, names: Sequence[str]) -> None:
    """The child: answers each buffer with its hits, or with the name of the error, until the pipe closes."""
    detectors = [make(name) for name in names]
    pipe.send("+".join(detector.version() for detector in detectors))
    while True:
        try:
            text = pipe.recv_bytes()
        except EOFError:
            return
        try:
            hits = [tuple(hit) for detector in detectors for hit in detector.scan(text)]
            answer = _dump(hits) if hits else _NO_HITS
        except (
            Exception
        ) as error:  # whatever a detector raises, its message may quote what it read: the name alone goes out
            answer = _dump(f"a detector raised {type(error).__name__}")
        pipe.send_bytes(answer)
