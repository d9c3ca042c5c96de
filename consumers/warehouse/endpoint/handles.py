"""What the endpoint needs of an engine in this process: a fresh handle a query. Handles share the engine, and nothing
else: settings, database and role are a handle's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

from chdb.state.sqlitelike import Connection

from millrace.consumers.warehouse.endpoint.faults import engine_message, of_engine
from millrace.consumers.warehouse.endpoint.watch import RunningQuery

OpenHandle = Callable[[], Connection]
"""gives a handle of one engine; whoever asks for it closes it"""


class Handle:
    """One handle, with the engine's errors as QueryError. One thread at a time. run: whose time it takes."""

    def __init__(self, connection: Connection, run: RunningQuery | None = None) -> None:
        self._run = run or RunningQuery(math.inf)
        self._connection = connection
        self._raw: Any = connection._conn

    def text(self, sql: str, params: dict[str, str] | None = None) -> str:
        """The only column of an answer, a row a line. Raises QueryError."""
        return cast("bytes", self.run(sql, "TSVRaw", params).bytes()).decode()

    def run(self, sql: str, form: str, params: dict[str, str] | None = None) -> Any:
        """The whole answer in format `form`. Raises QueryError."""
        try:
            with self._run.inside():
                return self._raw.query(sql, form, params=params or {})
        except (RuntimeError, UnicodeDecodeError) as error:
            raise of_engine(engine_message(error)) from None

    def pieces(self, sql: str, form: str, params: dict[str, str]) -> Generator[bytes, None, None]:
        """The answer a block at a time; a SELECT alone. Raises QueryError, also after pieces."""
        try:
            with self._run.inside():
                stream = self._raw.send_query(sql, form, params=params)
        except (RuntimeError, UnicodeDecodeError) as error:
            raise of_engine(engine_message(error)) from None
        is_over = False
        try:
            while True:
                with self._run.inside():
                    result = self._raw.streaming_fetch_result(stream)
                piece: bytes = b"" if result is None else result.bytes()
                if not piece:
                    is_over = True
                    return
                yield piece
        except (RuntimeError, UnicodeDecodeError) as error:
            is_over = True
            raise of_engine(engine_message(error)) from None
        finally:
            if not is_over:
                with self._run.inside():
                    self._raw.streaming_cancel_query(stream)

    def insert(self, sql: str, form: str, data: bytes) -> int:
        """Insert rows of format `form`; gives how many. Raises QueryError."""
        try:
            inserter: Any = self._connection.send_insert(sql, form)
            inserter.append(data)
            return cast("int", inserter.finish().rows_written)
        except (RuntimeError, UnicodeDecodeError) as error:
            raise of_engine(engine_message(error)) from None

    def classify(self, sql: str) -> tuple[str, int]:
        """What the engine takes a text for (`READ_ONLY`, `MUTATING`, `CONTROL`, ...), and how many statements it is."""
        result = self._raw.classify_query(sql)
        return str(result["query_class"].name), int(result["statement_count"])

    def close(self) -> None:
        """Let go of it."""
        self._connection.close()


@contextmanager
def handle(opens: OpenHandle, run: RunningQuery | None = None) -> Iterator[Handle]:
    """A handle, closed afterwards. run: whose time it takes. Raises QueryError when the engine gives none."""
    try:
        connection = opens()
    except (RuntimeError, UnicodeDecodeError) as error:
        raise of_engine(engine_message(error)) from None
    with closing(Handle(connection, run)) as engine:
        yield engine
