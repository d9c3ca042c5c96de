"""The store in a directory of this machine, opened by this process (chdb).

    data/  the engine's   lock  who holds it   engine.xml, users.xml  its limits and roles   tmp/  emptied at each start
    engine  its version

Invariants: one process holds a directory, for as long as it lives, and the lock says which and where it answers; the
lock is taken before the engine opens anything; a process opens one directory at a time, since the engine can no more;
an engine never opens what a newer one wrote (it would put aside whatever it cannot read, as broken).
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import chdb
import clickhouse_connect
from chdb.state.sqlitelike import Connection
from clickhouse_connect.driver.client import Client

from millrace.consumers.warehouse.store.access import users
from millrace.consumers.warehouse.store.base import Insertion, Store, failure
from millrace.consumers.warehouse.store.columns import text
from millrace.consumers.warehouse.store.lock import lock
from millrace.consumers.warehouse.store.tables import VIEWS
from millrace.infra import durable
from millrace.infra.errors import WarehouseError

MB = 1 << 20
LITTLE = MB
"""bytes that an engine needs to start"""


class TableDirectory(Store):
    """Tables in `path`. memory_mb: what queries and inserts may take together; url: where this process will answer
    queries, for who comes second. Raises WarehouseHeld when another process has it, WarehouseError when it cannot be
    opened."""

    def __init__(self, path: Path, *, memory_mb: int = 2048, url: str = "") -> None:
        self.where = str(path)
        self._path = path.absolute()
        self._lock = lock(self._path, url)
        self._former = tempfile.tempdir
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()
        self._kept = threading.local()
        self._anchor: Connection | None = None
        try:
            self._refuse_newer()
            self._options = {"config-file": str(self._configure(memory_mb))}
            # The engine stays open as long as one handle does.
            self._anchor = self.handle()
            self.prepare()
            durable.write(self._path / "engine", chdb.engine_version)
        except BaseException:  # an interrupt too: the lock would stay as long as this process
            self._let_go()
            raise

    def handle(self) -> Connection:
        """A fresh handle of the engine itself (0.2 ms). Whoever asks for it closes it."""
        try:
            return chdb.connect(f"{self._path / 'data'}?config-file={self._options['config-file']}")
        except RuntimeError as error:
            if shutil.disk_usage(self._path).free < LITTLE:
                raise WarehouseError(
                    f"the disk of the tables in {self.where} is full: make room, then start again"
                ) from error
            raise WarehouseError(
                f"the tables in {self.where} cannot be opened: {str(error)[:500]}. One process opens one directory; if "
                "nothing else here is open, `millrace warehouse rebuild` makes them anew from the log"
            ) from error

    def client(self, database: str = VIEWS) -> Client:
        session = clickhouse_connect.get_client(
            interface="chdb", path=str(self._path / "data"), database=database, chdb_options=self._options
        )
        self._clients.add(session)
        return session

    def borrow(self, database: str = VIEWS) -> AbstractContextManager[Client]:
        """One of this thread and a database: a new one asks the engine for every setting that it has."""
        clients = self._kept.__dict__
        if database not in clients:
            clients[database] = self.client(database)
        return nullcontext(clients[database])

    def insert(self, into: Insertion, data: Sequence[bytes], query_id: str) -> None:
        file = os.memfd_create("block")
        try:
            for piece in data:
                _write(file, piece)
            source = f"file({text(f'/proc/self/fd/{file}')}, 'Avro', {text(into.structure)})"
            with self.handle() as handle:
                handle.query(into.sql(source))
        except (RuntimeError, UnicodeDecodeError) as error:
            raise failure(f"{self.where} refuses rows of {into.target}", error) from error
        finally:
            os.close(file)

    def settle(self, query_ids: Sequence[str]) -> None:
        """Nothing to wait for: an insert ends with the process that holds the directory."""

    def close(self) -> None:
        if self._anchor is None:
            return
        for client in list(self._clients):
            with suppress(Exception):
                client.close()
        self._kept = threading.local()
        self._let_go()

    def _let_go(self) -> None:
        """Of the engine, the folder for temporary files and the lock, in that order."""
        if self._anchor is not None:
            self._anchor.close()
            self._anchor = None
        tempfile.tempdir = self._former
        os.close(self._lock)

    def _refuse_newer(self) -> None:
        """Raises WarehouseError for tables of a newer engine."""
        with suppress(FileNotFoundError):
            version = (self._path / "engine").read_text()
            if _numbers(version) > _numbers(chdb.engine_version):
                raise WarehouseError(
                    f"the tables in {self.where} were written by ClickHouse {version}, and this one is "
                    f"{chdb.engine_version}: upgrade chdb-core, or give this release a [warehouse] home of its own"
                )

    def _configure(self, memory_mb: int) -> Path:
        """Write the engine's limits; gives the file."""
        tmp = self._path / "tmp"
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(mode=0o700)
        tempfile.tempdir = str(tmp)  # clients of the engine write what they insert there
        users_file = self._path / "users.xml"
        durable.write(users_file, users())
        limits: dict[str, Any] = {
            "users_config": users_file,
            "max_server_memory_usage": memory_mb * MB,
            "mark_cache_size": memory_mb * MB // 16,
            "index_mark_cache_size": memory_mb * MB // 64,
            "primary_index_cache_size": memory_mb * MB // 32,
            "uncompressed_cache_size": 0,
            "index_uncompressed_cache_size": 0,
            "query_cache": {"max_size_in_bytes": memory_mb * MB // 64},
            "query_condition_cache_size": memory_mb * MB // 64,
            "compiled_expression_cache_size": 16 * MB,
            "background_pool_size": 2,
            "tmp_path": f"{tmp}/engine/",
        }
        file = self._path / "engine.xml"
        durable.write(file, f"<clickhouse>{_xml(limits)}</clickhouse>")
        return file


def _numbers(version: str) -> list[int]:
    """A version to compare."""
    return [int(number) for number in re.findall(r"\d+", version)]


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _xml(values: dict[str, Any]) -> str:
    return "".join(
        f"<{name}>{_xml(value) if isinstance(value, dict) else escape(str(value))}</{name}>"
        for name, value in values.items()
    )
