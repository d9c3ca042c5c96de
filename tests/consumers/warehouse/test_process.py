"""`millrace warehouse` over a real broker: what is written while it runs comes in; a rebuild gives the same rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from millrace.consumers.warehouse.client import open_asking
from millrace.consumers.warehouse.open_store import open_store
from millrace.consumers.warehouse.store.tables import TABLES
from millrace.infra.config import Settings, load
from millrace.infra.config.read import variables
from millrace.infra.connect import connect
from millrace.infra.errors import MillraceError
from millrace.infra.log.base import Outgoing
from millrace.infra.process.net import free_ports
from tests.support.history import History
from tests.support.warehouse import differing, digests

PATIENCE_S = 120


def copied(made: History, settings: Settings, *, aborted: bool) -> None:
    """Write the world's records under the namespace of the settings; with some that are aborted."""
    with connect(settings) as bus:
        bus.ensure_topics(settings.layout.specs())
        with bus.transactor(f"{settings.namespace}.writer") as transactor:
            for keep in [False, True] if aborted else [True]:
                transactor.begin()
                for topic in made.bus.topics("test."):
                    name = f"{settings.namespace}.{topic.removeprefix('test.')}"
                    for part in range(made.bus.partitions(topic)):
                        for record in made.bus.read(topic, part):
                            if "changelog" not in topic:
                                transactor.send(Outgoing(name, record.key, record.value, record.headers, part))
                transactor.flush()
                transactor.commit({}, None) if keep else transactor.abort()


def rows(settings: Settings) -> int:
    """Committed records that become rows."""
    with connect(settings) as bus:
        topics = [topic for topic in bus.topics(f"{settings.namespace}.") if "changelog" not in topic]
        own = f"{settings.namespace}.workers"  # the process writes there itself
        found = [r for t in topics if t != own for p in range(bus.partitions(t)) for r in bus.read(t, p)]
    return sum(1 for record in found if record.value != b"not avro")


def taken_in(settings: Settings) -> int:
    """Rows that the process gives to whoever asks it; -1 while it does not answer."""
    union = " UNION ALL ".join(f"SELECT off FROM {table.full_name}" for table in TABLES if table.name != "workers")
    try:
        with open_asking(settings) as asking:
            return int(asking.table(f"SELECT count() AS found FROM ({union})")["found"][0].as_py())
    except MillraceError:
        return -1


@pytest.mark.slow
@pytest.mark.kafka
def test_the_log_comes_in_and_a_rebuild_gives_the_same_rows(broker: str, tmp_path: Path) -> None:
    flags = {
        "namespace": f"w{uuid.uuid4().hex[:8]}",
        "home": str(tmp_path / "home"),
        "kafka.bootstrap": broker,
        "kafka.local": "false",
        "policy.name": "pico",
        "topics.shards": "4",
        "topics.short_hours": "1000000",
        "warehouse.memory_mb": "512",
        "warehouse.port": str(free_ports(1)[0]),
    }
    settings = load(flags=flags)
    copied(History(1, versions=2), settings, aborted=True)
    environment = {**os.environ, **variables(flags)}
    command = [sys.executable, "-P", "-m", "millrace.apps.cli.main", "warehouse"]
    with (tmp_path / "log").open("wb") as log:
        for number in (signal.SIGKILL, signal.SIGTERM):
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            taken(process, settings, rows(settings), tmp_path / "log")
            if number == signal.SIGKILL:
                copied(History(2, versions=2), settings, aborted=False)  # while it runs
                taken(process, settings, wanted := rows(settings), tmp_path / "log")
            process.send_signal(number)
            assert process.wait(60) in (-number, 128 + number), (tmp_path / "log").read_text()[-3000:]
    with open_store(settings) as store:
        before = digests(store)
        assert sum(count for name, (count, _) in before.items() if name not in ("workers", "unreadable")) == wanted
    done = subprocess.run([*command, "rebuild"], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "trajectories" in done.stdout
    with open_store(settings) as store:
        after = digests(store)
    for name in before:
        if name == "workers":
            assert after[name][0] >= before[name][0] > 0
        else:
            assert differing({name: before[name]}, after) == []


def taken(process: subprocess.Popen[bytes], settings: Settings, wanted: int, log: Path) -> None:
    """Wait until the process gives that many rows."""
    until = time.monotonic() + PATIENCE_S
    while (found := taken_in(settings)) != wanted:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < until, f"{found} of {wanted} rows: {log.read_text()[-3000:]}"
        time.sleep(0.2)
