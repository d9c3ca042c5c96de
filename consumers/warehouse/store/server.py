"""The store on a ClickHouse server or cluster, by URL. The same code and SQL as in a directory.

Invariant: an insert that may still run is waited for before anybody asks how far the tables are. An insert is sent
once: what became of one whose answer is lost, only the tables say."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import clickhouse_connect
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import Error as DriverError

from millrace.consumers.warehouse.store.base import Insertion, Store, failure
from millrace.consumers.warehouse.store.columns import text
from millrace.consumers.warehouse.store.tables import VIEWS
from millrace.infra.errors import WarehouseError

LOOK_S = 0.1
PATIENCE_S = 60.0
"""how long an insert of a process that died may still run"""


class Server(Store):
    """A server by URL, such as `http://user:password@host:8123`. Raises WarehouseError where none answers."""

    is_shared = True

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._kept: dict[str, Client] = {}
        self.where = url.rpartition("@")[2]
        try:
            with clickhouse_connect.get_client(dsn=url) as client:
                client.command("SELECT 1")
        except (DriverError, ValueError) as error:
            raise WarehouseError(f"no ClickHouse answers at {self.where}: {error}. It is [warehouse] url.") from error

    def client(self, database: str = VIEWS) -> Client:
        try:
            return clickhouse_connect.get_client(dsn=self._url, database=database, autogenerate_session_id=False)
        except DriverError as error:
            raise failure(f"{self.where} does not answer", error) from error

    def borrow(self, database: str = VIEWS) -> AbstractContextManager[Client]:
        """One of a database for all: a new one asks the server for every setting that it has."""
        with self._lock:
            if database not in self._kept:
                self._kept[database] = self.client(database)
            return nullcontext(self._kept[database])

    def insert(self, into: Insertion, data: Sequence[bytes], query_id: str) -> None:
        sql = f"{into.sql(f'input({text(into.structure)})')} FORMAT Avro"
        with self.borrow("default") as client:
            try:
                client.command(sql, data=b"".join(data), settings={"query_id": query_id, "log_comment": query_id})
            except DriverError as error:
                raise failure(f"{self.where} refuses rows of {into.target}", error) from error

    def settle(self, query_ids: Sequence[str]) -> None:
        until, prefixes = time.monotonic() + PATIENCE_S, tuple(query_ids)
        while True:
            running = self.rows("SELECT query_id, Settings['log_comment'] FROM system.processes")
            inserts = [name for names in running for name in names if name.startswith(prefixes)]
            if not inserts:
                return
            if time.monotonic() > until:
                raise WarehouseError(
                    f"an insert of a former warehouse process runs on at {self.where}: end it there (KILL QUERY WHERE "
                    f"query_id = {text(inserts[0])}), or wait"
                )
            time.sleep(LOOK_S)

    def close(self) -> None:
        for client in self._kept.values():
            client.close()
        self._kept.clear()
