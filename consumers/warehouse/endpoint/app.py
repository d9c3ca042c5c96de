"""The endpoint over HTTP, as a ClickHouse server answers.

    GET, POST /                one query        GET /ping, /replicas_status    whether it serves (no key asked for)

Invariants: an answer's status is decided before its first byte, by the query's first block; a query that fails later
says so in the body, in the form that clients look for (of a packed body that the engine does not let go of: it is cut
off); a client that goes away ends its query; queries run in threads of their own, a bounded number at a time."""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from millrace.consumers.warehouse.endpoint.encoding import pack
from millrace.consumers.warehouse.endpoint.faults import (
    REQUIRED_PASSWORD,
    TIMEOUT,
    TOO_LARGE,
    TOO_MANY_QUERIES,
    QueryError,
)
from millrace.consumers.warehouse.endpoint.query import Query, QueryAnswer, QueryRunner
from millrace.consumers.warehouse.endpoint.request import LONGEST, AccessKey, QueryRequest, check_caller, read_request
from millrace.consumers.warehouse.endpoint.watch import LOOK_S, RunningQuery
from millrace.infra.principals.watch import PrincipalWatch

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""queries that run at a time"""
WAITING = 64
"""queries that may wait for one of them to end"""
BODY_S = 60.0
"""within which a query must have come"""
OK = "Ok.\n"
TEXT = "text/plain; charset=UTF-8"
T = TypeVar("T")
Takes = Callable[[Request, bytes], Response | None]
"""what answers a request before readers do, in tests: the insert it asks for, or None"""


class QueryEndpoint:
    """Answers requests. `principals`: whose the keys of the log are, beside `key`. `takes`: for tests alone,
    what takes inserts; None: nobody does."""

    def __init__(
        self, reader: QueryRunner, key: str, *, takes: Takes | None = None, principals: PrincipalWatch | None = None
    ) -> None:
        self._reader, self._key, self._takes = reader, AccessKey(key, principals), takes
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="query")
        self._running = 0
        self.app = Starlette(
            routes=[
                Route("/", self.query, methods=["GET", "POST"]),
                Route("/ping", self.ping),
                Route("/replicas_status", self.ping),
            ],
            exception_handlers={QueryError: self._refuse, Exception: self._bug},
        )

    async def ping(self, request: Request) -> Response:
        """Whether it serves."""
        check_caller(request.headers)
        return Response(OK, media_type=TEXT)

    async def query(self, request: Request) -> Response:
        """One query. Raises QueryError, which becomes its answer."""
        check_caller(request.headers)
        self._key.check(request.headers, request.query_params)
        body = await self._body(request)
        if self._takes is not None and (response := await self._thread(self._takes, request, body)) is not None:
            return response
        asks = read_request(request.query_params.multi_items(), request.headers, body)
        if not asks.query.sql.strip() and request.method == "GET":
            return Response(OK, media_type=TEXT)
        if self._running >= AT_ONCE + WAITING:
            raise QueryError(f"{self._running} queries are running or waiting: try again soon.", TOO_MANY_QUERIES)
        self._running += 1
        with ExitStack() as unsent:
            unsent.callback(self._count_down)
            answer = await self._ask(asks.query)
            unsent.callback(self._threads.submit, answer.close)
            tag = secrets.token_hex(8)
            pieces = pack(with_error(answer.pieces(), tag, self._reader.version), asks.encoding)
            headers = self._headers(asks, answer, tag)
            return _StreamingAnswer(
                self._send(pieces, answer.run, "" if asks.encoding else tag),
                unsent.pop_all().close,
                media_type(answer.form),
                headers,
            )

    async def _ask(self, query: Query) -> QueryAnswer:
        """The answer, begun; closed where nobody waits for it any more."""
        run = self._reader.run()
        asking = self._threads.submit(self._reader.ask, query, run)
        try:
            return await _within(run, asking)
        except (asyncio.CancelledError, QueryError):
            asking.add_done_callback(_drop)
            raise

    async def _send(self, pieces: Iterator[bytes], run: RunningQuery, tag: str) -> AsyncIterator[bytes]:
        """The pieces. tag: with which a late error is told; empty where it cannot be, so the answer is cut off."""
        try:
            while piece := await _within(run, self._threads.submit(next, pieces, b"")):
                yield piece
        except QueryError as error:
            if not tag:
                raise
            yield mark(error, tag, self._reader.version)

    def _count_down(self) -> None:
        self._running -= 1

    async def _body(self, request: Request) -> bytes:
        most = LONGEST if self._takes is None else 1 << 40
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    body += piece
                    if len(body) > most:
                        raise QueryError(f"the query is longer than {LONGEST} bytes: use fewer literals.", TOO_LARGE)
        except TimeoutError:
            raise QueryError(
                f"the query did not come within {BODY_S:g} s: send it again.", TIMEOUT, "TIMEOUT"
            ) from None
        except ClientDisconnect:
            raise QueryError("the client went away.", 209, "SOCKET_TIMEOUT") from None
        return bytes(body)

    def _headers(self, asks: QueryRequest, answer: QueryAnswer, tag: str) -> dict[str, str]:
        summary = {
            "read_rows": str(answer.rows_read),
            "read_bytes": str(answer.bytes_read),
            "written_rows": "0",
            "written_bytes": "0",
            "total_rows_to_read": "0",
            "result_rows": "0",
            "result_bytes": str(len(answer.first)),
            "elapsed_ns": str(int(answer.elapsed_s * 1e9)),
        }
        encoding = {"Content-Encoding": asks.encoding} if asks.encoding else {}
        return {
            **self._common(asks.query_id),
            **encoding,
            "X-ClickHouse-Format": answer.form,
            "X-ClickHouse-Exception-Tag": tag,
            "X-ClickHouse-Summary": orjson.dumps(summary).decode(),
        }

    def _common(self, query_id: str) -> dict[str, str]:
        return {
            "X-ClickHouse-Server-Display-Name": "millrace",
            "X-ClickHouse-Query-Id": query_id
            if query_id.isprintable() and query_id.isascii() and query_id
            else str(uuid.uuid4()),
            "X-ClickHouse-Timezone": self._reader.timezone,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, QueryError)
        asks = {"WWW-Authenticate": 'Basic realm="millrace warehouse"'} if error.code == REQUIRED_PASSWORD else {}
        return Response(
            error.wire(self._reader.version),
            status_code=error.status,
            media_type=TEXT,
            headers={
                **self._common(request.query_params.get("query_id", "")),
                **asks,
                "X-ClickHouse-Exception-Code": str(error.code),
            },
        )

    async def _bug(self, request: Request, error: Exception) -> Response:
        logger.error("a query of the endpoint failed in it", exc_info=error)
        answer = QueryError("the endpoint failed: its log has the error. Report it.", 1002, "UNKNOWN_EXCEPTION")
        return await self._refuse(request, answer)

    async def _thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args))

    def close(self) -> None:
        """Take no more queries, and let those that run end: within their time limit."""
        self._threads.shutdown(wait=True)


async def _within(run: RunningQuery, work: Future[T]) -> T:
    """What `work` gives. Raises QueryError where the time of its query is over, and the engine does not end it."""
    waiting = asyncio.wrap_future(work)
    while not (await asyncio.wait([waiting], timeout=LOOK_S))[0]:
        run.check()
    return waiting.result()


class _StreamingAnswer(StreamingResponse):
    """An answer in pieces; `end` is called once it was sent, or the client went away."""

    def __init__(
        self, pieces: AsyncIterator[bytes], end: Callable[[], None], kind: str, headers: dict[str, str]
    ) -> None:
        super().__init__(pieces, media_type=kind, headers=headers)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def with_error(pieces: Iterator[bytes], tag: str, version: str) -> Iterator[bytes]:
    """The pieces, and after them the error of a query that fails late, as a server marks it."""
    try:
        yield from pieces
    except QueryError as error:
        yield mark(error, tag, version)


def mark(error: QueryError, tag: str, version: str) -> bytes:
    """An error that comes late, as a server marks it."""
    message, word = error.wire(version).rstrip("\n").encode(), tag.encode()
    return b"\r\n__exception__\r\n%s\r\n%s\n%d %s\r\n__exception__\r\n" % (word, message, len(message) + 1, word)


def media_type(form: str) -> str:
    """Content-Type of a format."""
    low = form.lower()
    if "json" in low or low == "ndjson":
        lines = "eachrow" in low or "lines" in low or low == "ndjson"
        return "application/x-ndjson; charset=UTF-8" if lines else "application/json; charset=UTF-8"
    if low.startswith(("tsv", "tabseparated")):
        return "text/tab-separated-values; charset=UTF-8"
    if low.startswith("csv"):
        return "text/csv; charset=UTF-8; header=" + ("present" if "withnames" in low else "absent")
    if low.startswith(("native", "rowbinary", "parquet", "arrow", "orc", "avro", "msgpack", "npy", "bson")):
        return "application/octet-stream"
    return TEXT


def _drop(asking: Any) -> None:
    if not asking.cancelled() and asking.exception() is None:
        asking.result().close()
