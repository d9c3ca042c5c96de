"""Detectors in a process of their own, so that a native crash or an endless match costs one event, not the stage.

Invariants: a scan ends with hits or with DetectorError within the timeout; after an error the next scan gets a fresh
process; the process ends when this one does, however this one ends (its pipe closes)."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from infra.errors import DetectorError
from streams.refine.detectors.base import Detector, Hit

START_S = 120.0
"""compiling every rule from cold takes seconds, more on a busy machine"""


class Guarded(Detector):
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
            if not self._pipe.poll(self._timeout):
                raise DetectorError(f"no answer of the detectors within {self._timeout:g} s")
            hits = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise DetectorError("the detectors' process died") from error
        except DetectorError:
            self.close()
            raise
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
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._names), daemon=True, name="detectors")
        process.start()
        theirs.close()
        self._process, self._pipe = process, ours
        try:
            if not ours.poll(START_S):
                raise DetectorError(f"the detectors did not start within {START_S:g} s")
            version: str = ours.recv()
        except (EOFError, DetectorError) as error:
            self.close()
            raise DetectorError(
                f"the detectors {', '.join(self._names)} did not start: run one alone to see why"
            ) from error
        return version


def make(name: str) -> Detector:
    """The detector that `module:Class` names."""
    module, _, kind = name.partition(":")
    made: Detector = getattr(importlib.import_module(module), kind)()
    return made


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
            answer: object = [tuple(hit) for detector in detectors for hit in detector.scan(text)]
        except (
            Exception
        ) as error:  # whatever a detector raises, its message may quote what it read: the name alone goes out
            answer = f"a detector raised {type(error).__name__}"
        pipe.send(answer)
