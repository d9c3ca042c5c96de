"""The limit of a query's time where the engine does not look: its client is told, and the process begins anew, under
the same id, with every row that it had."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.warehouse.endpoint.faults import QueryError
from millrace.consumers.warehouse.endpoint.watch import LET_GO_S, TOLD_S, RunningQuery, must_end
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.infra.process.net import free_ports

STUCK = (
    "SELECT sum(editDistance(concat(repeat('ab', 16000), toString(number)), repeat('ba', 16000))) FROM numbers(3000)"
)
"""one block, which takes an hour"""
MIDWAY = STUCK.replace("SELECT sum(editDistance", "SELECT if(number < 1000, 0, editDistance")
PATIENCE_S = 120
KEY = "the-key-of-this-test"

seconds = st.floats(0, 1000, allow_nan=False)
runs = st.lists(st.builds(RunningQuery, seconds, seconds, st.none() | seconds), max_size=5)


@given(runs, seconds)
def test_who_condemns_a_process(some: list[RunningQuery], now: float) -> None:
    """Never who is within a limit, or outside the engine; always who is far past it; others delay it, not for ever."""
    over = [run.over_s(now) for run in some]
    assert all(
        late <= now - (run.start_s + run.limit_s) or run.since is None for run, late in zip(some, over, strict=True)
    )
    assert all(late <= 0 for run, late in zip(some, over, strict=True) if run.since is None)
    if all(late <= LET_GO_S for late in over):
        assert not must_end(some, now)
    if any(late > 2 * LET_GO_S for late in over):
        assert must_end(some, now)
    asked = [run for run, late in zip(some, over, strict=True) if run.since is None or late > 0]
    assert must_end(asked, now) == any(late > LET_GO_S for late in over)


def test_a_client_is_told_once_its_time_is_over() -> None:
    slow = RunningQuery(5, start_s=time.monotonic() - 5 - TOLD_S - 1)
    slow.check()
    slow.since = slow.start_s
    with pytest.raises(QueryError, match="query_seconds") as told:
        slow.check()
    assert (told.value.code, told.value.status) == (159, 408)
    with slow.inside():
        slow.check()
    assert slow.since is None


def ask(url: str, sql: str) -> httpx.Response:
    """One query."""
    bounds = {"max_block_size": "1000", "max_threads": "1"} if sql == MIDWAY else {}
    headers = {"Accept-Encoding": "identity"}
    return httpx.post(url, content=sql, auth=("millrace", KEY), timeout=PATIENCE_S, params=bounds, headers=headers)


def asked_anew(url: str, process: subprocess.Popen[bytes], log: Path, wanted: str) -> None:
    """Wait until a process that has begun that often answers."""
    until = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < until, log.read_text()[-3000:]
        try:
            if ask(url, "SELECT name FROM steps ORDER BY off").text == wanted:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


@pytest.mark.slow
def test_a_query_that_the_engine_does_not_end_ends_with_its_process(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "tests.consumers.warehouse.endpoint.overdue",
        str(tmp_path / "tables"),
        str(port),
        KEY,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        for begun, sql in ((1, STUCK), (2, MIDWAY)):
            asked_anew(url, process, log, "".join(f"start {number}\n" for number in range(begun)))
            with ThreadPoolExecutor(1) as other:
                stuck = other.submit(ask, url, sql)
                while not stuck.done():
                    assert ask(url, "SELECT 1").text == "1\n", "others are answered meanwhile"
                    time.sleep(0.2)
            told = stuck.result()
            assert "[warehouse] query_seconds" in told.text
            if sql == STUCK:
                assert (told.status_code, told.headers["x-clickhouse-exception-code"]) == (408, "159")
            else:
                assert told.status_code == 200
                assert told.text.startswith("0\n" * 1000)
                assert told.text.endswith("__exception__\r\n"), "what came late is told late"
        asked_anew(url, process, log, "start 0\nstart 1\nstart 2\n")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
        process.kill()
    assert log.read_text().count("ended with the process") == 2


@pytest.mark.slow
def test_a_command_that_opened_the_directory_itself_leaves(tmp_path: Path) -> None:
    with TableDirectory(tmp_path / "tables" / "dev", memory_mb=512):
        pass
    command = [sys.executable, "-P", "-m", "millrace.apps.cli.main", "--set", f"warehouse.home={tmp_path / 'tables'}"]
    command += ["--set", "warehouse.query_seconds=1", "sql", STUCK]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "[warehouse] query_seconds" in done.stderr
