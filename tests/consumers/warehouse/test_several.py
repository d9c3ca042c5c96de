"""Several `millrace warehouse` on one server, over a real broker: one is frozen, its partitions are taken over, it
wakes, another one is killed. Every record is one row."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from millrace.consumers.warehouse.ingest.shares import group_of
from millrace.consumers.warehouse.rebuild import alone
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.consumers.warehouse.store.server import Server
from millrace.consumers.warehouse.store.tables import TABLES
from millrace.infra.config import Settings, load
from millrace.infra.config.read import variables
from millrace.infra.connect import connect
from millrace.infra.errors import WarehouseError
from tests.consumers.warehouse.test_process import PATIENCE_S, copied, rows
from tests.support.history import History
from tests.support.stores import SERVERS, server_url


def places(server: Server) -> list[tuple[str, int, int]]:
    """Of every row, doubled ones too."""
    union = " UNION ALL ".join(f"SELECT topic, part, off FROM {table.full_name}" for table in TABLES)
    return [row for row in server.rows(f"SELECT * FROM ({union})") if not row[0].endswith(".workers")]


def owners(settings: Settings) -> dict[str, int]:
    """Processes of the group, and how many partitions each has."""
    with connect(settings) as bus:
        view = bus.group(group_of(settings.namespace))
    return {each.client_id: len(each.partitions) for each in view.members} if view.stable else {}


def wait(settings: Settings, server: Server, members: int, running: list[subprocess.Popen[bytes]], log: Path) -> None:
    """Until every record is a row, and so many processes have a share."""
    wanted, until = rows(settings), time.monotonic() + PATIENCE_S
    while len(found := places(server)) < wanted or len(owners(settings)) != members:
        assert all(process.poll() is None for process in running), log.read_text()[-3000:]
        assert time.monotonic() < until, f"{len(found)} of {wanted}, {owners(settings)}: {log.read_text()[-3000:]}"
        time.sleep(0.3)
    assert len(set(found)) == len(found) == wanted


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.parametrize("kind", SERVERS)
def test_processes_share_a_server(kind: str, broker: str, tmp_path: Path) -> None:
    with server_url(kind, tmp_path / "tables") as url, Server(url) as server:
        flags = {
            "namespace": f"w{uuid.uuid4().hex[:8]}",
            "home": str(tmp_path / "home"),
            "kafka.bootstrap": broker,
            "kafka.local": "false",
            "policy.name": "pico",
            "topics.shards": "4",
            "topics.short_hours": "1000000",
            "warehouse.url": url,
        }
        settings = load(flags=flags)
        migrate(server)
        copied(History(1, versions=1), settings, aborted=True)
        command = [sys.executable, "-P", "-m", "millrace.apps.cli.main", "warehouse"]
        environment = {**os.environ, **variables(flags)}
        with (tmp_path / "log").open("wb") as log:
            running = [subprocess.Popen(command, env=environment, stdout=log, stderr=log) for _ in range(2)]
            try:
                wait(settings, server, 2, running, tmp_path / "log")
                assert set(owners(settings).values()) == {1}
                with connect(settings) as bus, pytest.raises(WarehouseError, match="end them, then rebuild"):
                    alone(bus, server, settings.namespace)
                running[0].send_signal(signal.SIGSTOP)
                copied(History(2, versions=1), settings, aborted=False)
                wait(settings, server, 1, running, tmp_path / "log")
                running[0].send_signal(signal.SIGCONT)
                copied(History(3, versions=1), settings, aborted=False)
                wait(settings, server, 2, running, tmp_path / "log")
                running.pop().kill()
                wait(settings, server, 1, running, tmp_path / "log")
                running[0].terminate()
                assert running[0].wait(60) in (-signal.SIGTERM, 128 + signal.SIGTERM)
            finally:
                for process in running:
                    process.kill()
                    process.wait()
