"""Where the tables lie, as one contract with two siblings: `directory` (chdb in this process) and `server` (by URL).

Invariants: one process holds a directory, and who comes second learns who that is; what an insert is given becomes one
part or nothing, since nothing splits, gathers or remembers blocks; memory and caches stay within the settings; no
record of the log is ever written to a file outside the tables (an insert's bytes lie in memory).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import Error as DriverError

from millrace.consumers.warehouse.store.columns import backtick
from millrace.consumers.warehouse.store.tables import LOG, VIEWS
from millrace.infra.errors import WarehouseError, WarehouseTaken

REFUSAL = "another warehouse process has taken this partition over"
"""what an insert fails with whose process has lost its partition"""
MOST = 2000
"""characters of what is told of an engine's refusal"""
ONE_PART: Mapping[str, int | str] = {
    "async_insert": 0,
    "insert_deduplicate": 0,
    "max_insert_threads": 1,
    "max_threads": 1,
    "max_insert_block_size": 1 << 40,
    "min_insert_block_size_rows": 1 << 40,
    "min_insert_block_size_bytes": 1 << 60,
    "max_block_size": 1 << 40,
    "input_format_parallel_parsing": 0,
    "short_circuit_function_evaluation": "'force_enable'",
}
"""settings under which one INSERT is one part: rows and bytes are gathered until they end"""


@dataclass(frozen=True, slots=True)
class Insertion:
    """How rows come from Avro into a table (or a table function). structure: what is read, as `path type, ...`;
    values: SQL over these paths, one a column; where: what every row must fulfil, or the insert fails as a whole."""

    table: str
    columns: tuple[str, ...]
    values: tuple[str, ...]
    structure: str
    where: str = "1"

    @property
    def target(self) -> str:
        """What to call it in a message."""
        return "a dry run" if self.table.startswith("FUNCTION") else self.table

    def sql(self, source: str) -> str:
        """The statement that reads `source`, a table function."""
        settings = ", ".join(f"{name} = {value}" for name, value in ONE_PART.items())
        columns = f" ({', '.join(map(backtick, self.columns))})" if self.columns else ""
        return (
            f"INSERT INTO {self.table}{columns} SELECT {', '.join(self.values)} FROM {source} WHERE {self.where}"
            f" SETTINGS {settings}"
        )


class Store(ABC):
    """The tables and views. Handles are of one thread each; the store itself may be asked by several."""

    where: str
    """directory or URL, for messages"""
    is_shared = False
    """whether other processes may write to the same tables"""

    @abstractmethod
    def client(self, database: str = VIEWS) -> Client:
        """A fresh handle that may do everything. Whoever asks for it closes it."""

    @abstractmethod
    def insert(self, into: Insertion, data: Sequence[bytes], query_id: str) -> None:
        """Insert the rows of an Avro object file, given in pieces, as one part or not at all. Raises WarehouseError,
        whose `code` is ClickHouse's."""

    @abstractmethod
    def settle(self, query_ids: Sequence[str]) -> None:
        """Wait until no insert runs whose id begins as one of these: from then on what tables say of it is final."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it. Idempotent."""

    def borrow(self, database: str = VIEWS) -> AbstractContextManager[Client]:
        """A handle for one call, which it may share with others."""
        return self.client(database)

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None, database: str = LOG) -> list[tuple[Any, ...]]:
        """Rows of a query. Raises WarehouseError."""
        with self.borrow(database) as client:
            try:
                answer = client.query(sql, parameters=dict(parameters or {}))
                return cast("list[tuple[Any, ...]]", answer.result_rows)
            except DriverError as error:
                raise failure(f"{self.where} refuses a query", error) from error

    def run(self, sql: str, database: str = "default") -> None:
        """Run a statement without an answer. Raises WarehouseError."""
        with self.borrow(database) as client:
            try:
                client.command(sql)
            except DriverError as error:
                raise failure(f"{self.where} refuses a statement", error) from error

    def prepare(self) -> None:
        """Make the two databases where they are not."""
        for database in (LOG, VIEWS):
            self.run(f"CREATE DATABASE IF NOT EXISTS {backtick(database)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


CODE = re.compile(r"[Cc]ode: (\d+)")
DISK_FULL = re.compile(r"No space left on device|[Cc]ode: 243\b")


def failure(refusal: str, error: Exception) -> WarehouseError:
    """The error for what the engine refused, with its code where it names one."""
    # What the engine quotes of a record need not be text.
    message = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    code = CODE.search(message)
    if DISK_FULL.search(message):
        refusal = f"{refusal}, as its disk is full: make room, then it goes on"
    kind = WarehouseTaken if REFUSAL in message else WarehouseError
    return kind(f"{refusal}: {message[:MOST]}", int(code.group(1)) if code else 0)
