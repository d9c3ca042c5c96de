"""An endpoint over a directory that notes each of its starts, as a process: its arguments are DIRECTORY, PORT, KEY."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

from millrace.consumers.warehouse.endpoint import watch
from millrace.consumers.warehouse.endpoint.app import QueryEndpoint
from millrace.consumers.warehouse.endpoint.query import QueryLimits, QueryRunner
from millrace.consumers.warehouse.endpoint.serve import Serving
from millrace.consumers.warehouse.serve import begin_anew
from millrace.consumers.warehouse.store.directory import TableDirectory


def main(path: Path, port: int, key: str) -> None:
    """Serve until SIGTERM."""
    logging.basicConfig()
    before = os.getpid()
    watch.LET_GO_S = 5.0
    with TableDirectory(path, memory_mb=512) as store:
        store.run(
            "CREATE TABLE IF NOT EXISTS millrace_log.starts (off UInt64, name String, pid UInt64)"
            " ENGINE = MergeTree ORDER BY off"
        )
        store.run("CREATE OR REPLACE VIEW millrace.steps AS SELECT off, name FROM millrace_log.starts")
        rows = store.rows("SELECT pid FROM millrace_log.starts")
        assert all(pid == before for (pid,) in rows), "it keeps its id"
        store.run(f"INSERT INTO millrace_log.starts VALUES ({len(rows)}, 'start {len(rows)}', {before})")
        reader = QueryRunner(store.handle, QueryLimits(seconds=1), overdue=partial(begin_anew, threading.Event()))
        serving = Serving(QueryEndpoint(reader, key), port)
        signal.sigwait({signal.SIGTERM})
        serving.close()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
