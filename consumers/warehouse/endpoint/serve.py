"""The endpoint's port, in a thread of the process that holds the warehouse: an event loop of its own beside ingest.

Invariant: it listens on loopback alone; when `close` returns, nothing listens and no query runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server

from millrace.consumers.warehouse.endpoint.app import QueryEndpoint
from millrace.consumers.warehouse.endpoint.handles import OpenHandle
from millrace.consumers.warehouse.endpoint.query import QueryLimits, QueryRunner
from millrace.infra.config import Settings
from millrace.infra.errors import ServiceError
from millrace.infra.local_keys import WAREHOUSE, make_keys, warehouse_key
from millrace.infra.principals.watch import PrincipalWatch
from millrace.infra.process.net import LOCALHOST, is_listening, wait_until

HEADER_BYTES = 64 << 10
START_S = 60.0


class Serving:
    """`endpoint` on a port of loopback. `url`: where. Raises ServiceError when it cannot listen there."""

    def __init__(self, endpoint: QueryEndpoint, port: int) -> None:
        self.url = f"http://{LOCALHOST}:{port}"
        self._endpoint = endpoint
        if is_listening(LOCALHOST, port):
            raise ServiceError(f"another program listens on port {port}: choose another one with [warehouse] port")
        self._server: Any = Server(
            endpoint.app,
            LOCALHOST,
            port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,  # the limits below are those of HTTP/1
            websockets=False,
            log_level=LogLevels.warning,
            http1_settings=HTTP1Settings(header_read_timeout=30_000, max_buffer_size=HEADER_BYTES),
        )
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()
        wait_until(self._is_ready, f"the warehouse's endpoint at {self.url}", START_S, every_s=0.02)

    def _is_ready(self) -> bool:
        if not self._thread.is_alive():
            raise ServiceError(f"the warehouse cannot listen at {self.url}: {self._failed or 'its log says why'}")
        return is_listening(LOCALHOST, int(self.url.rpartition(":")[2]))

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except (Exception, SystemExit) as error:  # uvicorn exits where it cannot listen; `_is_ready` says why
            self._failed = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve()

    def _interrupt(self) -> None:
        self._server.main_loop_interrupt.set()
        self._server.interrupt_signal = True

    @property
    def is_alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._interrupt)
            self._thread.join()
        self._endpoint.close()


def open_endpoint(
    opens: OpenHandle,
    settings: Settings,
    overdue: Callable[[], None] | None = None,
    principals: PrincipalWatch | None = None,
) -> Serving:
    """The endpoint of a deployment over the engine behind `opens`, with its key, which is made where there is none.
    principals: whose the keys of the log are. overdue: ends this process, where the engine does not end a query. Raises
    ServiceError when it cannot listen on `[warehouse] port`."""
    make_keys(settings, WAREHOUSE)
    warehouse = settings.warehouse
    limits = QueryLimits(warehouse.query_seconds, warehouse.query_memory_mb << 20, warehouse.query_rows)
    runner = QueryRunner(opens, limits, overdue=overdue)
    return Serving(QueryEndpoint(runner, warehouse_key(settings), principals=principals), warehouse.port)
