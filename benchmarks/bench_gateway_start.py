"""How long a gateway takes from kill -9 until `/health` says that it is ready, by the calls that its log holds.

    python -m benchmarks.bench_gateway_start --calls 1000000 [--route responses] [--unsent]

A real process and a real broker. The log is that of `benchmarks.bench_start`: calls that have ended, behind them some
that live, the newest checkpoint as old as one may be. Each kill finds that checkpoint again. The time is that of the
whole process, its imports included, against the same process over an empty log and against 3 s. `--unsent`: the broker
was away, and has none of it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from benchmarks.bench_start import BODIES, written
from millrace.consumers import version_zero
from millrace.infra.config import load, variables
from millrace.infra.connect import connect
from millrace.infra.machine.broker import Broker
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.producers.gateway.sessions import checkpoint
from tests.support.tiny_model import write_model

AIM_S = 3.0
PATIENCE_S = 600.0
ROOT = Path(__file__).parents[1]


class GatewayStart(NamedTuple):
    """Seconds until a process was ready, its CPU seconds until then, and the MiB that it held then."""

    ready_s: float
    cpu_s: float
    memory: float


def start(environment: dict[str, str], url: str, output: Path) -> GatewayStart:
    """Start a gateway, wait until it is ready, and kill it."""
    command = [sys.executable, "-P", "-m", "millrace.apps.cli.main", "gateway"]
    with output.open("ab") as file:
        began = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=ROOT)
    try:
        while not ready(url):
            assert process.poll() is None, output.read_text()
            assert time.perf_counter() - began < PATIENCE_S, output.read_text()
            time.sleep(0.01)
        seconds, process_now = time.perf_counter() - began, psutil.Process(process.pid)
        cpu = process_now.cpu_times()
        return GatewayStart(seconds, cpu.user + cpu.system, process_now.memory_info().rss / (1 << 20))
    finally:
        process.kill()
        process.wait()


def ready(url: str) -> bool:
    """Whether a gateway takes calls."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def measure(home: Path, bootstrap: str, calls: int, route: str, kills: int, *, unsent: bool) -> None:
    """Start over an empty log and over a full one, and print both."""
    port, engine = free_ports(2)
    flags = {
        "home": str(home),
        "namespace": f"start{os.getpid()}",
        "kafka.bootstrap": bootstrap,
        "kafka.local": "false",
        "gateway.port": str(port),
        "gateway.engine_url": f"http://{LOCALHOST}:{engine}",
    }
    settings = load(flags=flags)
    with connect(settings) as bus:
        bus.ensure_topics(settings.layout.specs())
        version_zero.create(settings, write_model(home / "model"), bus)
    environment = {**os.environ, **variables(flags), "PYTHONPATH": str(ROOT)}
    url, folder = f"http://{LOCALHOST}:{port}", settings.gateway.capture_dir
    start(environment, url, home / "gateway.log")  # the first makes keys, and fills the caches of files
    empty = [start(environment, url, home / "gateway.log") for _ in range(kills)]
    shutil.rmtree(folder)
    written(folder, calls, route)
    old = home / "checkpoint"
    shutil.copy(folder / checkpoint.FILE, old)
    size = sum(path.stat().st_size for path in folder.iterdir()) / (1 << 20)
    print(f"{calls} ended calls by /v1/{route}, {size:.0f} MiB, {'none' if unsent else 'all'} of it in the topic")
    full = []
    for _ in range(kills):
        shutil.copy(old, folder / checkpoint.FILE)
        if unsent:
            (folder / "acked").unlink(missing_ok=True)
        full.append(start(environment, url, home / "gateway.log"))
    print(f"{'median':12} | {'ready s':>7} | {'CPU s':>6} | {'MiB at ready':>12}")
    for name, starts in (("empty log", empty), ("full log", full)):
        seconds, cpu, memory = (median(values) for values in zip(*starts, strict=True))
        print(f"{name:12} | {seconds:>7.2f} | {cpu:>6.2f} | {memory:>12.0f}")
    ratio = median(one.ready_s for one in full) / median(one.ready_s for one in empty)
    worst = max(one.ready_s for one in full)
    print(f"of {kills} kills: {ratio:.2f} times an empty log's; at most {worst:.2f} s, against {AIM_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--route", choices=[*BODIES], default="chat/completions")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--unsent", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Broker(Path(name) / "broker") as broker:
        broker.start()
        measure(
            Path(name) / "home", broker.bootstrap, options.calls, options.route, options.kills, unsent=options.unsent
        )


if __name__ == "__main__":
    main()
