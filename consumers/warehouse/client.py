"""Who asks the warehouse from another process: `millrace sql`, `millrace ask` and what reads tables for a page.

    [warehouse] url -> that server      held directory -> the endpoint of who holds it      else -> the directory itself

Invariants: the three give the same bytes for the same query; each runs only what the guard of the endpoint lets pass,
so none can write, read files or reach out; an error is what the engine said, without its decorations, and names the
tables there are where one is unknown; who asks an endpoint loads no engine, no Arrow and no HTTP library, which would
take longer than most answers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, unquote, urlencode, urlsplit, urlunsplit

from millrace.consumers.warehouse.endpoint.faults import UNKNOWN_TABLE, QueryError, brief, of_engine
from millrace.consumers.warehouse.store.lock import holder
from millrace.infra.config import Settings
from millrace.infra.errors import WarehouseError
from millrace.infra.local_keys import USER, warehouse_key
from millrace.infra.terminal import Terminal

if TYPE_CHECKING:
    import pyarrow as pa

    from millrace.consumers.warehouse.endpoint.guard import Guard
    from millrace.consumers.warehouse.endpoint.query import QueryLimits
    from millrace.consumers.warehouse.store.directory import TableDirectory

CONNECT_S = 5.0
PIECE = 1 << 16
"""bytes of an answer that are read at once, at most"""
LOOKS = {"readonly": "1", "database": "millrace"}
"""settings of all that is asked of a server"""
TABLES = "SELECT DISTINCT name FROM system.tables WHERE database = 'millrace' AND name NOT LIKE '.%' ORDER BY name"
Value = str | int | float | bool | Sequence[Any]
"""value of a parameter `{name:Type}`"""


class Asking(ABC):
    """Answers queries. One thread at a time."""

    @abstractmethod
    def pieces(self, sql: str, form: str, params: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[bytes]:
        """The answer's bytes. `params` as ClickHouse writes values in TSV. Raises QueryError, also after pieces."""

    def ask(
        self,
        sql: str,
        form: str = "TabSeparated",
        params: Mapping[str, Value] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> Iterator[bytes]:
        """The answer's bytes in a format of ClickHouse. params: values of `{name:Type}` in the query; settings: those
        that shape an answer. Raises QueryError, for an unknown table with those that there are."""
        try:
            texts = {name: value_text(value) for name, value in (params or {}).items()}
            yield from self.pieces(sql, form, texts, settings or {})
        except QueryError as error:
            if error.code != UNKNOWN_TABLE:
                raise brief(error) from None
            there = ", ".join(b"".join(self.pieces(TABLES, "TSVRaw", {}, {})).decode().split())
            raise QueryError(
                f"{error.said} Tables: {there or 'none yet'}; those of the log as it is are in millrace_log.",
                error.code,
                error.name,
            ) from None

    def table(self, sql: str, params: Mapping[str, Value] | None = None) -> pa.Table:
        """The answer as an Arrow table. Raises QueryError."""
        import pyarrow as pa

        data = b"".join(self.ask(sql, "ArrowStream", params))
        return pa.ipc.open_stream(data).read_all() if data else pa.table({})

    @abstractmethod
    def close(self) -> None:
        """Let go of it. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class OverHttp(Asking):
    """An endpoint, which looks at each query itself; each has a connection of its own. timeout_s: without a byte; own:
    settings that are sent with every query."""

    def __init__(self, url: str, user: str, password: str, timeout_s: float, defaults: Mapping[str, str]) -> None:
        self._url, self._defaults = url, dict(defaults)
        self._headers = {"X-ClickHouse-User": user.encode(), "X-ClickHouse-Key": password.encode()}
        self._timeout_s = timeout_s

    def pieces(self, sql: str, form: str, params: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[bytes]:
        return self._answer(sql, form, params, {**self._defaults, **settings})

    def _answer(self, sql: str, form: str, params: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[bytes]:
        query = {**settings, "default_format": form, "wait_end_of_query": "1"}
        query |= {f"param_{name}": value for name, value in params.items()}
        try:
            with closing(self._connect()) as connection:
                connection.request("POST", f"/?{urlencode(query, quote_via=quote)}", sql.encode(), self._headers)
                answer = connection.getresponse()
                if answer.status != 200 or "x-clickhouse-exception-code" in answer.headers:
                    raise of_engine(answer.read().decode(errors="replace"))
                yield from _pieces(answer)
        except (OSError, HTTPException) as error:
            raise WarehouseError(
                f"{self._url} does not answer ({type(error).__name__} {error}): `millrace status` says whether the "
                "warehouse runs, its log why not"
            ) from None

    def _connect(self) -> HTTPConnection:
        parts = urlsplit(self._url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_S)
        connection.connect()
        connection.sock.settimeout(self._timeout_s)
        return connection

    def close(self) -> None:
        """Nothing stays open between queries."""


def _pieces(answer: HTTPResponse) -> Iterator[bytes]:
    """The bytes of an answer as they come. Raises IncompleteRead where it ends before its length."""
    while piece := answer.read1(PIECE):
        yield piece
    if answer.length:
        raise IncompleteRead(b"", answer.length)


class OfServer(OverHttp):
    """A server by URL, which knows no guard: this process looks at each query before it is sent. What a name means is
    asked of the server, as its functions are others than those of the engine here."""

    _guard: Guard | None = None

    def pieces(self, sql: str, form: str, params: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[bytes]:
        from millrace.consumers.warehouse.endpoint.guard import Functions, Guard

        self._guard = self._guard or Guard(Functions.of(self))
        statement = self._guard.admit(self, sql, params)
        yield from super().pieces(statement.sql, statement.form or form, params, settings)

    def text(self, sql: str, params: dict[str, str] | None = None) -> str:
        """What the guard asks, without the limits of a query."""
        return b"".join(self._answer(sql, "TSVRaw", params or {}, LOOKS)).decode()

    def classify(self, sql: str) -> None:
        """A server does not say; `readonly` has it refuse what changes anything."""


class InDirectory(Asking):
    """The directory of a warehouse that does not run. Raises WarehouseHeld when another process has it."""

    def __init__(
        self, directory: TableDirectory, limits: QueryLimits, overdue: Callable[[], None] | None = None
    ) -> None:
        from millrace.consumers.warehouse.endpoint.query import QueryRunner

        self._held = ExitStack()
        self._held.callback(directory.close)
        self._reader = QueryRunner(directory.handle, limits, overdue=overdue)

    def pieces(self, sql: str, form: str, params: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[bytes]:
        from millrace.consumers.warehouse.endpoint.query import Query

        return self._reader.ask(Query(sql, params, settings, form=form, is_whole=True)).pieces()

    def close(self) -> None:
        self._held.close()


def leave() -> None:
    """End this process, which is a command: the engine works on in it, and hears no ^C."""
    message = "error: the query is past [warehouse] query_seconds, and the engine has not ended it"
    Terminal(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)
    os._exit(1)


def open_asking(settings: Settings, overdue: Callable[[], None] | None = None) -> Asking:
    """Who answers for this deployment now. overdue: ends this process, where it has opened the directory and the engine
    does not end a query; a command gives `leave`, and without it such a query hangs. Raises WarehouseError where nobody
    can answer."""
    warehouse, home = settings.warehouse, settings.warehouse_home
    patience = warehouse.query_seconds + 30
    url = warehouse.read_url.get_secret_value() or warehouse.url.get_secret_value()
    if not url and (process := holder(home)) and process[1]:
        return OverHttp(process[1], USER, warehouse_key(settings), patience, {})
    from millrace.consumers.warehouse.endpoint.query import QueryLimits

    limits = QueryLimits(warehouse.query_seconds, warehouse.query_memory_mb << 20, warehouse.query_rows)
    if url:
        parts = urlsplit(url)
        address = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], "", "", ""))
        defaults = {**limits.settings(), **LOOKS}
        user, password = unquote(parts.username or "default"), unquote(parts.password or "")
        return OfServer(address, user, password, patience, defaults)
    if not (home / "data").is_dir():
        raise WarehouseError(f"there is no warehouse in {home} yet: `millrace up` fills one from the log")
    from millrace.consumers.warehouse.store.directory import TableDirectory

    return InDirectory(TableDirectory(home, memory_mb=warehouse.memory_mb), limits, overdue)


def value_text(value: Value) -> str:
    """A value as ClickHouse reads one of a parameter. Pure."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _escape(value)
    if isinstance(value, Sequence):
        return "[" + ",".join(_inner(one) for one in value) + "]"
    return repr(value)


def _inner(value: Any) -> str:
    """An element of an array: text in quotes."""
    return "'" + _escape(value).replace("'", "\\'") + "'" if isinstance(value, str) else value_text(value)


def _escape(text: str) -> str:
    for character, escape in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"), ("\0", "\\0")):
        text = text.replace(character, escape)
    return text
