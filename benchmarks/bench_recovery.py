"""kill -9 of a learner to the next committed version, split into detection, regroup, reload and retrain.

    python -m benchmarks.bench_recovery [--kills 6] [--learners 3]

A local broker, a tiny model (228,384 parameters) and groups written straight into the log; `--learners` processes train
together, every second victim is rank 0, and each is replaced before the next kill. Seconds after the kill:

    detect    first survivor's generation broke          regroup   process group formed among the survivors
    reload    all survivors have loaded the version      retrain   the next version is committed
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.consumers import policy_names
from millrace.infra.config import Settings
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.machine.broker import Broker
from tests.support.feed import feed, settings_for, start_policy
from tests.support.learners import Learners, entries, until, version

AHEAD = 10
PHASES = ("detect", "regroup", "reload", "retrain")


class Feeder(threading.Thread):
    """Keeps batches ahead of the learners."""

    def __init__(self, bootstrap: str, settings: Settings) -> None:
        super().__init__(daemon=True)
        self._bus = KafkaBus(bootstrap)
        self._settings = settings
        self._over = threading.Event()
        self._next = 0

    def run(self) -> None:
        while not self._over.is_set():
            if self._next < version(self._bus, self._settings) + AHEAD:
                feed(self._bus, self._settings, range(4 * self._next, 4 * self._next + 4))
                self._next += 1
            else:
                self._over.wait(0.05)

    def close(self) -> None:
        """Stop feeding."""
        self._over.set()
        self.join()
        self._bus.close()


def owners(bus: KafkaBus, settings: Settings) -> list[str]:
    """Member ids that own partitions, by lowest partition; [] while the group is not stable."""
    view = bus.group(policy_names.group(settings))
    rows = [(min(p for _, p in m.partitions), m.member_id) for m in view.members if m.partitions]
    return [member for _, member in sorted(rows)] if view.stable else []


def split(learners: Learners, survivors: list[int], killed: float) -> Mapping[str, float] | None:
    """Seconds after the kill of each phase's end, or None while one is missing."""
    after = [[(at - killed, name) for at, name in learners.times(n) if at > killed] for n in survivors]

    def first(name: str, since: float = 0.0) -> list[float]:
        return [next((at for at, said in rows if said == name and at >= since), float("inf")) for rows in after]

    broke = min(first("broke"))
    formed = first("formed")
    loaded = first("loaded")
    committed = min(first("committed", max(loaded)))
    found = dict(zip(PHASES, (broke, max(formed), max(loaded), committed), strict=True))
    return None if committed == float("inf") else found


def main() -> None:
    """Run the kills and print one line each, then medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--learners", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Broker(Path(name) / "broker") as broker:
        broker.start()
        rows = measure(Path(name), broker.bootstrap, arguments.kills, arguments.learners)
    print("median  " + "  ".join(f"{phase} {statistics.median(row[phase] for row in rows):.2f}" for phase in PHASES))


def measure(folder: Path, bootstrap: str, kills: int, count: int) -> list[Mapping[str, Any]]:
    """One row of phases a kill."""
    settings, file = settings_for(folder, bootstrap, "bench")
    bus = KafkaBus(bootstrap)
    start_policy(settings, bus, folder)
    feeder = Feeder(bootstrap, settings)
    feeder.start()
    rows: list[Mapping[str, Any]] = []
    with Learners(folder, file) as learners:
        alive = [learners.start() for _ in range(count)]
        for kill in range(kills):
            until(lambda: len(owners(bus, settings)) == count, learners)
            together = version(bus, settings)
            until(lambda together=together: _all_in(bus, settings, together, count), learners)
            ranks = owners(bus, settings)
            rank = 0 if kill % 2 == 0 else 1 + kill // 2 % (count - 1)
            victim = next(n for n in alive if f":{learners.port(n)}-" in ranks[rank])
            alive.remove(victim)
            killed = time.time()
            learners.kill(victim)
            until(lambda killed=killed: split(learners, alive, killed) is not None, learners)
            row = split(learners, alive, killed)
            assert row is not None
            rows.append(row)
            print(f"rank {rank}  " + "  ".join(f"{p} {row[p]:.2f}" for p in PHASES), flush=True)
            if kill + 1 < kills:
                alive.append(learners.start())
    feeder.close()
    list(entries(bus, settings))
    print(f"{version(bus, settings)} versions, chain unbroken", file=sys.stderr)
    bus.close()
    return rows


def _all_in(bus: KafkaBus, settings: Settings, since: int, count: int) -> bool:
    """Whether a version after `since` was trained by `count` ranks."""
    newest = entries(bus, settings)[-1]
    return newest["version"] > since and len(newest["ranks"]) == count


if __name__ == "__main__":
    main()
