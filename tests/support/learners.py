"""Learner processes under test: started with settings of their own, killed, frozen, and read back from the log."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from millrace.consumers import policy_names
from millrace.infra.config import Settings
from millrace.infra.log.base import Bus
from millrace.infra.log.history import ledger, newest
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas.records import LedgerEntry
from tests.support.feed import settings_for, start_policy
from tests.support.forked import Fork

ROOT = Path(__file__).parent.parent.parent
LOOK_S = 0.25
PROGRAM = """
import json, logging, os, signal, sys, time
if os.environ.get("MEGATRON_SHIM"):
    from tests.support import megatron_shim
    megatron_shim.install()
logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
from millrace.infra import faults
from millrace.infra.config import load
from millrace.consumers.learner.serve import run
freezes = os.environ.get("FREEZE_DIR")
def freeze(name):
    hold = os.path.join(freezes, "hold-" + name)
    while os.path.exists(hold):  # at work, as far as the broker knows
        open(os.path.join(freezes, "held-" + str(os.getpid())), "w").close()
        time.sleep(0.02)
    try:
        os.unlink(os.path.join(freezes, name))
    except FileNotFoundError:
        return
    open(os.path.join(freezes, "frozen-" + str(os.getpid())), "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)
if freezes:
    faults.install(freeze)
out = open(os.environ["TIMES"], "a", buffering=1)
def at(name):
    out.write(json.dumps([time.time(), name]) + "\\n")
run(load(), on_phase=at)
"""


class Learners:
    """Processes `millrace learn`, numbered in order of their start. `file`: their settings. Ends what is left when the
    block ends."""

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder = folder
        self.file = file
        self.processes: list[Fork] = []

    def start(self, **environment: str) -> int:
        """Start one more; gives its number."""
        number = len(self.processes)
        chosen = {
            **os.environ,
            "MILLRACE_CONFIG": str(self.file),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TIMES": str(self._folder / f"times-{number}.jsonl"),
            **environment,
        }
        self.processes.append(Fork(PROGRAM, chosen, ROOT, self._folder / f"learner-{number}.log"))
        return number

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal to a learner."""
        self.processes[number].send_signal(what)

    def kill(self, number: int) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(number, signal.SIGKILL)
        self.processes[number].wait()

    def alive(self, number: int) -> bool:
        """Whether it still runs."""
        return self.processes[number].poll() is None

    def wait(self, number: int, timeout_s: float = 180) -> int:
        """Its exit code, once it has ended."""
        return self.processes[number].wait(timeout_s)

    def output(self, number: int) -> str:
        """What it has written so far."""
        return (self._folder / f"learner-{number}.log").read_text(errors="replace")

    def times(self, number: int) -> list[tuple[float, str]]:
        """(wall clock, state) as the state machine passed them."""
        path = self._folder / f"times-{number}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(at, name) for at, name in map(json.loads, lines)]

    def port(self, number: int) -> int:
        """Where its rendezvous store listens, as it says when it is built."""
        return int(next(name for _, name in self.times(number) if name.startswith("port ")).split()[1])

    def everything(self) -> str:
        """All outputs, for a failed assertion."""
        return "\n".join(f"--- learner {n}\n{self.output(n)[-3000:]}" for n in range(len(self.processes)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        if kind is not None:
            print(self.everything(), file=sys.stderr)


class Place:
    """One learner process's worth of work, in this thread, over a bus in memory. `model`: what it starts from."""

    def __init__(self, folder: Path, heads: int = 3, model: Path | None = None, **flags: Any) -> None:
        self.settings: Settings = settings_for(folder, "127.0.0.1:1", "t", **flags)[0]
        self.bus = MemoryBus()
        self.warnings: list[str] = []
        self.entries: list[LedgerEntry] = []
        start_policy(self.settings, self.bus, folder, heads=heads, model=model)

    def learn(self, versions: int, bus: Any = None, on_phase: Callable[[str], None] | None = None) -> None:
        """Run a learner until `versions` are committed."""
        from millrace.consumers.learner.build import build
        from millrace.consumers.learner.group.watch import Watchdog
        from millrace.consumers.learner.learner import Learner
        from millrace.consumers.learner.step.parts import LearnerObserver

        chosen = self.settings.model_copy(
            update={"learner": self.settings.learner.model_copy(update={"max_versions": versions})}
        )
        parts = build(chosen, bus or self.bus, stopping=lambda: False)
        place = self

        class Observer(LearnerObserver):
            def on_phase(self, phase: str) -> None:
                if on_phase is not None:
                    on_phase(phase)

            def on_commit(self, entry: LedgerEntry) -> None:
                place.entries.append(entry)

            def warn(self, text: str) -> None:
                place.warnings.append(text)

        parts.observer = Observer()
        watchdog = Watchdog(self.bus, parts.group, parts.backend.abort)
        try:
            Learner(parts, watchdog).run()
        finally:
            watchdog.close()


def entries(bus: Bus, settings: Settings) -> list[Mapping[str, Any]]:
    """The whole ledger, its chain checked."""
    topic = policy_names.topics(settings)["ledger"]
    return list(ledger.entries(bus.read(topic, 0)))


def version(bus: Bus, settings: Settings) -> int:
    """The newest committed version."""
    names = policy_names.topics(settings)
    head = newest.head(bus, names["weights"], names["ledger"])
    return head.version if head else -1


def until(what: Callable[[], bool], learners: Learners, timeout_s: float = 180) -> None:
    """Poll until `what`, which asks the broker: half as long as it has taken so far, up to `LOOK_S`, so that who waits
    leaves the processor to the learners. Fails with their outputs."""
    began = time.monotonic()
    while not what():
        waited = time.monotonic() - began
        assert waited < timeout_s, f"not in {timeout_s} s\n{learners.everything()}"
        time.sleep(min(LOOK_S, max(0.05, waited / 2)))
