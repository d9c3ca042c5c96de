"""A ClickHouse server for tests where none is installed: the warehouse's endpoint over an engine in this process,
without its guard, and taking inserts. What speaks to a server by HTTP can be tested against it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import cramjam
from starlette.requests import Request
from starlette.responses import Response

from millrace.consumers.warehouse.endpoint.app import QueryEndpoint
from millrace.consumers.warehouse.endpoint.guard import Guard, Statement, canonical
from millrace.consumers.warehouse.endpoint.handles import Handle, OpenHandle, handle
from millrace.consumers.warehouse.endpoint.query import QueryLimits, QueryRunner
from millrace.consumers.warehouse.endpoint.serve import Serving
from millrace.consumers.warehouse.endpoint.words import identifier, literal
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.infra.process.net import free_ports

PASSWORD = "secret"
_READS = re.compile(
    r"\s*(?:/\*.*?\*/\s*)*\(*\s*(SELECT|WITH|SHOW|DESC(?:RIBE)?|EXPLAIN|EXISTS)\b", re.IGNORECASE | re.DOTALL
)
_INSERT = re.compile(rb"\s*INSERT\s+INTO\b", re.IGNORECASE)
_FORMAT = re.compile(r"\s+FORMAT\s+(\w+)\s*$", re.IGNORECASE)
_INPUT = re.compile(r"\binput\(")
_TRANSPORT = (
    *("query", "query_id", "database", "session_id", "user", "password", "default_format", "wait_end_of_query"),
    *("enable_http_compression", "send_progress_in_http_headers", "http_headers_progress_interval_ms"),
    "client_protocol_version",
)


class Unguarded(Guard):
    """Lets everything through."""

    def admit(self, engine: Handle, text: str, params: Mapping[str, str]) -> Statement:
        """The text as it is, its format apart."""
        written = canonical(engine, text)
        found = _FORMAT.search(written)
        return Statement(_FORMAT.sub("", written), found[1] if found else "", streams=False)


class Writable(QueryRunner):
    """A reader that may do everything."""

    databases = frozenset(("default", "millrace", "millrace_log", "system"))

    def __init__(self, opens: OpenHandle) -> None:
        super().__init__(opens, QueryLimits(), database="default")
        self._guard = Unguarded(self._guard._functions)

    def _bind(self, engine: Handle, bounds: Mapping[str, str]) -> None:
        """No limits."""


class Writes:
    """Runs what is no query: the `takes` of an Endpoint."""

    def __init__(self, opens: OpenHandle) -> None:
        self._opens = opens

    def __call__(self, request: Request, body: bytes) -> Response | None:
        """The answer of an insert or a command; None for queries. Raises QueryError."""
        if packed := request.headers.get("content-encoding"):
            body = bytes(getattr(cramjam, packed).decompress(body))
        sql, data = self._split(request.query_params.get("query", ""), body)
        if _READS.match(sql):
            return None
        written = 0
        with handle(self._opens) as engine:
            engine.text(f"USE {identifier(request.query_params.get('database') or 'default')}")
            settings = {k: v for k, v in request.query_params.items() if k not in _TRANSPORT and k[:6] != "param_"}
            if settings:
                engine.text("SET " + ", ".join(f"{k} = {literal(v)}" for k, v in settings.items()))
            params = {k[6:]: v for k, v in request.query_params.items() if k.startswith("param_")}
            form = _FORMAT.search(sql)
            if form and _INPUT.search(sql):
                self._insert_from_input(engine, _FORMAT.sub("", sql), form[1], data)
            elif form:
                written = engine.insert(_FORMAT.sub("", sql), form[1], data)
            else:
                engine.run(sql + data.decode(), "TabSeparated", params)
        headers = {
            "X-ClickHouse-Summary": f'{{"written_rows":"{written}"}}',
            "X-ClickHouse-Query-Id": request.query_params.get("query_id", "q"),
        }
        return Response(b"", headers=headers)

    @staticmethod
    def _split(sql: str, body: bytes) -> tuple[str, bytes]:
        """The statement, and the rows after it."""
        if sql:
            return sql, body
        if _INSERT.match(body) and (
            found := re.match(rb".*?\bFORMAT\s+\w+[ \t]*\r?\n?", body, re.DOTALL | re.IGNORECASE)
        ):
            return found[0].decode().strip(), body[found.end() :]
        return body.decode(), b""

    @staticmethod
    def _insert_from_input(engine: Handle, sql: str, form: str, data: bytes) -> None:
        """`INSERT ... SELECT ... FROM input('structure')`, which the engine takes from a file only."""
        file = os.memfd_create("rows")
        try:
            os.write(file, data)
            engine.run(_INPUT.sub(f"file('/proc/self/fd/{file}', '{form}', ", sql), "TabSeparated")
        finally:
            os.close(file)


@contextmanager
def clickhouse_server(folder: Path, password: str = PASSWORD) -> Iterator[str]:
    """A server with tables in `folder`; gives its URL, user and password in it."""
    with TableDirectory(folder) as directory:
        port = free_ports(1)[0]
        endpoint: Any = QueryEndpoint(Writable(directory.handle), password, takes=Writes(directory.handle))
        serving = Serving(endpoint, port)
        try:
            yield f"http://default:{quote(password, safe='')}@127.0.0.1:{port}"
        finally:
            serving.close()
