"""One query for a reader: admitted, bounded and run on a handle of its own.

Invariants: time, memory and rows of a query are bounded, whatever it asks for (time that the engine does not bound by
`watch`); nothing of one query is seen by another;
the handle is closed when its answer was taken, dropped or failed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from millrace.consumers.warehouse.endpoint import permissions
from millrace.consumers.warehouse.endpoint.faults import BAD_ARGUMENTS, READONLY, UNKNOWN_DATABASE, QueryError
from millrace.consumers.warehouse.endpoint.guard import Functions, Guard, check_format
from millrace.consumers.warehouse.endpoint.handles import Handle, OpenHandle, handle
from millrace.consumers.warehouse.endpoint.native import FRAME_PROTOCOL, make_frame
from millrace.consumers.warehouse.endpoint.watch import QueryWatch, RunningQuery
from millrace.consumers.warehouse.endpoint.words import identifier, literal
from millrace.consumers.warehouse.store.access import READER

BLOCK_ROWS = 65_409
"""the engine's own measure: the limit of time is looked at between blocks, so a query may not ask for larger ones"""
DEFAULT_FORMAT = "TabSeparated"
IN_PIECES = frozenset(
    ("Native", "TabSeparated", "TSV", "CSV", "RowBinary", "JSONEachRow", "NDJSON", "JSONLines", "JSONL")
)
"""formats whose blocks need nothing before, between or after them"""


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """What one query may take at most."""

    seconds: float = 60.0
    memory_bytes: int = 1 << 30
    rows: int = 10_000_000
    threads: int = 4

    def settings(self) -> dict[str, str]:
        """As settings of the engine. Pure."""
        most = {
            "max_execution_time": max(1, math.ceil(self.seconds)),
            "max_memory_usage": self.memory_bytes,
            "max_result_rows": self.rows,
            "max_result_bytes": self.memory_bytes,
            "max_threads": self.threads,
        }
        return {name: str(value) for name, value in most.items()}


@dataclass(frozen=True, slots=True)
class Query:
    """A query as it came. params: values of `{name:Type}`, written as ClickHouse writes them in TSV; settings: as the
    client sent them; form: the format where the query names none; is_whole: nothing may be sent before it has ended;
    protocol: version of ClickHouse's protocol by which the client reads format Native, 0 for none."""

    sql: str
    params: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    database: str = ""
    form: str = DEFAULT_FORMAT
    is_whole: bool = False
    protocol: int = 0


@dataclass(slots=True)
class QueryAnswer:
    """form: format of the bytes; first: those that are there already; rest: the others, a QueryError among them where
    the query fails late. Close it when it is not taken to its end. rows: read, bytes: read; 0 where not known yet."""

    form: str
    first: bytes
    rest: Iterator[bytes] | None = None
    rows_read: int = 0
    bytes_read: int = 0
    elapsed_s: float = 0.0
    resources: ExitStack = field(default_factory=ExitStack)
    run: RunningQuery = field(default_factory=lambda: RunningQuery(math.inf))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def pieces(self) -> Iterator[bytes]:
        """All of it. Raises QueryError where the query fails late."""
        try:
            piece = self.first
            while piece:
                yield piece
                piece = self._next()
        finally:
            self.close()

    def _next(self) -> bytes:
        with self._lock:
            return b"" if self._is_closed or self.rest is None else next(self.rest, b"")

    def close(self) -> None:
        """Stop the query where it still runs, once the piece that is being made is there. Idempotent, and for any
        thread."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self.resources.close()


class QueryRunner:
    """Runs readers' queries over one engine. May be shared by threads; each query runs in its caller's.

    database: where names without one are looked up; overdue: ends this process, see `watch`."""

    databases = permissions.DATABASES

    def __init__(
        self,
        opens: OpenHandle,
        limits: QueryLimits,
        database: str = "millrace",
        *,
        overdue: Callable[[], None] | None = None,
    ) -> None:
        self._opens, self._limits, self._database = opens, limits, database
        self._watch = QueryWatch(overdue)
        with handle(opens) as engine:
            self._guard = Guard(Functions.of(engine))
            roles = engine.text("SELECT arrayStringConcat(currentRoles(), ' ')").split()
            self.version = engine.text("SELECT version()").strip()
            self.timezone = engine.text("SELECT timezone()").strip()
        self._role = READER in roles

    def run(self) -> RunningQuery:
        """For a query that is about to be asked."""
        return RunningQuery(self._limits.seconds)

    def ask(self, query: Query, run: RunningQuery | None = None) -> QueryAnswer:
        """The answer, begun. run: tells its caller whether its time is over. Raises QueryError."""
        run = run or self.run()
        database = query.database or self._database
        if database not in self.databases:
            raise QueryError(f"database {database} is not served: use millrace or millrace_log.", UNKNOWN_DATABASE)
        bounds = engine_settings(query.settings, self._limits)
        with ExitStack() as resources:
            self._watch.begin(run)
            resources.callback(self._watch.end, run)
            engine = resources.enter_context(handle(self._opens, run))
            engine.text(f"USE {identifier(database)}")
            statement = self._guard.admit(engine, query.sql, query.params)
            form = statement.form or query.form or DEFAULT_FORMAT
            check_format(form)
            params = dict(query.params)
            if statement.streams and in_pieces(form, query):
                self._bind(engine, {**bounds, "max_result_bytes": "0"})
                blocks = engine.pieces(statement.sql, form, params)
                resources.callback(blocks.close)
                pieces = for_client(blocks, form, query)
                first = next(pieces, b"") or self._no_rows(engine, statement.sql, form, query)
                return QueryAnswer(form, first, pieces, resources=resources.pop_all(), run=run)
            self._bind(engine, bounds)
            result = engine.run(statement.sql, form, params)
            statistics = result.storage_rows_read(), result.storage_bytes_read(), result.elapsed()
            data = result.bytes()
            if statement.streams and not data:
                data = self._no_rows(engine, statement.sql, form, query)
            else:
                data = b"".join(for_client(iter([data]), form, query))
            return QueryAnswer(form, data, None, *statistics)

    def _no_rows(self, engine: Handle, sql: str, form: str, query: Query) -> bytes:
        """What stands for an answer without rows, where the engine says nothing."""
        if form != "Native":
            return b""
        block = no_rows(engine.text(f"DESCRIBE ({sql})", dict(query.params)))
        return b"".join(for_client(iter([block]), form, query))

    def _bind(self, engine: Handle, bounds: Mapping[str, str]) -> None:
        """From here on the handle is a reader's."""
        if self._role:
            engine.text(f"SET ROLE {READER}")
        engine.text("SET " + ", ".join(f"{name} = {literal(value)}" for name, value in bounds.items()))


def in_pieces(form: str, query: Query) -> bool:
    """Whether the answer may come a block at a time. Pure."""
    return (
        form in IN_PIECES and not query.is_whole and query.settings.get("output_format_json_array_of_rows", "0") == "0"
    )


def for_client(pieces: Iterator[bytes], form: str, query: Query) -> Iterator[bytes]:
    """The bytes as the client reads them. Pure."""
    return make_frame(pieces) if form == "Native" and query.protocol >= FRAME_PROTOCOL else pieces


def no_rows(description: str) -> bytes:
    """A block of format Native without rows, so that clients learn the columns. Pure."""
    columns = [line.split("\t")[:2] for line in description.splitlines()]
    out = bytearray(varint(len(columns)) + varint(0))
    for text in (text for column in columns for text in column):
        out += varint(len(text.encode())) + text.encode()
    return bytes(out)


def varint(value: int) -> bytes:
    """A length as ClickHouse writes it: seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def engine_settings(settings: Mapping[str, str], limits: QueryLimits) -> dict[str, str]:
    """The settings of a query: those that were asked for and are allowed, and the limits, which may be lowered only.
    Raises QueryError for any other setting. Pure."""
    out: dict[str, str] = {}
    most = {name: int(value) for name, value in limits.settings().items()} | {"max_block_size": BLOCK_ROWS}
    for name, value in settings.items():
        if name in most:
            try:
                limit = math.ceil(float(value))
            except (ValueError, OverflowError):
                raise QueryError(f"setting {name} must be a number, not {value!r}.", BAD_ARGUMENTS) from None
            most[name] = min(most[name], limit) if limit > 0 else most[name]
        elif name in permissions.SETTINGS or name.startswith(permissions.SETTINGS_BEGIN):
            out[name] = value
        elif name not in permissions.WITHOUT_EFFECT:
            raise QueryError(f"Cannot modify '{name}' setting in readonly mode: leave it out.", READONLY)
    constants = {
        "timeout_overflow_mode": "throw",
        "allow_introspection_functions": "0",
        "use_query_cache": "0",
        "output_format_native_encode_types_in_binary_format": "0",  # `native` reads the names of types
        "log_queries": "0",
        "readonly": "1",
    }
    return {"result_overflow_mode": "throw", **out, **{name: str(value) for name, value in most.items()}, **constants}
