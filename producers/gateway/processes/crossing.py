"""The public door of one process among several of a gateway: each request goes to the process that holds its
conversation, which may be this one.

Invariants: who sends is known before a body is read, and a body is within the bounds of any; a request that this
process may answer alone, as its headers show, is not touched; what came from another process goes no further; an error
has the shape of its API, whichever process it happened in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

import aiohttp
import msgspec
import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace.dialects import all as dialects
from millrace.dialects.errors import ApiError, bad_request
from millrace.infra.gateway_processes import is_drained, mark_drain
from millrace.infra.process.offload import run_aside
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.http.admission import Intake, check_origin
from millrace.producers.gateway.http.callers import Caller, key_of
from millrace.producers.gateway.http.session_path import PREFIX, strip_name
from millrace.producers.gateway.http.visit import Visit
from millrace.producers.gateway.marks import index_of
from millrace.producers.gateway.processes.evidence import at_the_door, ids_in, in_the_body
from millrace.producers.gateway.processes.hop import (
    ANY_CALL,
    HOLDER_CALL,
    HOP,
    KNOWN_IDS,
    SPENDING,
    BrokenOff,
    Hops,
    NobodyThere,
    cut_off,
    passed_on,
    process_down,
)
from millrace.producers.gateway.processes.owner import ProcessLayout, ProcessWay, choose_process, ways
from millrace.producers.gateway.sessions.ownership import HOLDER_ONLY, PATH
from millrace.producers.gateway.sessions.sessions import KEY_PREFIX
from millrace.producers.gateway.spending import Standing
from millrace.schemas.json_values import JsonObject

logger = logging.getLogger(__name__)

MISDIRECTED = 421
MISS_STATUSES = {400, 401, 404, MISDIRECTED}
"""what a process says that is asked only for what it holds, and does not hold it"""
ELSEWHERE = ":elsewhere"
"""the tenant of whoever bears the key of another process's session: which it is, that process knows"""
HEAR_S = 1.0
EVENT_STREAM = b"text/event-stream"
_HOLDER_ONLY_HEADER = (HOLDER_ONLY.encode(), b"1")
Local = Callable[[Headers, bytes], AsyncGenerator[bytes, None]]
"""what answers a request here with server-sent events; raises ApiError before the first of them"""


class Crossing:
    """Where the requests of a gateway's process go. `folder`: of the capture log of the first of them."""

    def __init__(self, gateway: Gateway, layout: ProcessLayout, hops: Hops, folder: Path) -> None:
        self.gateway = gateway
        self.layout = layout
        self.hops = hops
        self.folder = folder
        if not self.is_retired:
            mark_drain(folder, layout.here, is_drained=False)
        self.intake = Intake(gateway.options)
        self.stopping = False
        """whether nobody waits any longer for what other processes answer"""
        self._under_way: set[asyncio.Task[Any]] = set()

    @property
    def is_retired(self) -> bool:
        """Whether this process only ends what it holds."""
        return self.layout.here >= self.layout.processes

    @property
    def socket(self) -> Path:
        """Where the others reach this process."""
        return self.hops.socket_of(self.layout.here)

    def tasks(self) -> list[asyncio.Task[None]]:
        """What goes on beside the requests; that of a retired process ends once it is needed no more."""
        beside = self.wait_empty() if self.is_retired else self.listen()
        return [asyncio.create_task(beside)]

    async def drain(self, timeout_s: float) -> None:
        """Wait until the other processes have answered what came here, and break off what takes longer."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=timeout_s)
        self.stopping = True
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=timeout_s)

    @contextmanager
    def relaying(self) -> Iterator[None]:
        """The current task passes on what another process answers."""
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            yield
        finally:
            self._under_way.discard(task)

    def around(self, inner: ASGIApp) -> ASGIApp:
        """`inner` behind the public port."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await inner(scope, receive, send)
            try:
                at = strip_name(scope)
                headers = Headers(scope=at)
                if not self.gateway.options.keys:
                    check_origin(headers)
                door = at_the_door(at["method"], at["path"], headers)
                route, places = ways(door.evidence, self.layout), self._listing(at)
            except ApiError:
                return await inner(scope, receive, send)  # it says the same
            responses = at["method"] == "POST" and at["path"] == dialects.RESPONSES.path
            if door.reads is None and not responses and places is None and self._stays(route):
                return await inner(scope, receive, send)
            visit = Visit(self.intake, receive)
            try:
                self.caller(headers)
                body = await visit.body(Request(scope, receive))
                if door.reads is not None:
                    evidence = await run_aside(len(body), in_the_body, door.reads, body)
                    route = ways(evidence, self.layout)
                if responses:
                    exact = door.reads is not None and evidence.exact is not None
                    route = await self.settle(route, body, exact=exact)
                passage = _Passage(self, inner, scope, body, receive, send, visit)
                await (passage.along(route) if places is None else passage.gather(places))
            except ApiError as error:
                await visit.discard()
                await dialects.of_path(at["path"]).refusal(error)(scope, receive, send)
            finally:
                visit.close()

        return app

    def behind(self, inner: ASGIApp) -> ASGIApp:
        """`inner` behind the socket that the other processes know: what comes there stays."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return
            hop = dict(scope["headers"]).get(HOP, HOLDER_CALL)
            if hop == KNOWN_IDS:
                ids = msgspec.json.decode(await _read_body(receive), type=list[str])
                knows = self.gateway.sessions.replies.stored.knows
                return await _answer(send, 200, msgspec.json.encode([id for id in ids if knows(id)]))
            if hop == SPENDING:
                return await _answer(send, 200, msgspec.json.encode(self.gateway.recorder.spending.standing()))
            only = self.is_retired or hop == HOLDER_CALL
            await inner(_for_holder(scope) if only else scope, receive, send)

        return app

    async def listen(self) -> None:
        """Learn again and again what keys spend at the other processes, until cancelled."""
        spending = self.gateway.recorder.spending
        while True:
            for index in self.layout.holders:
                if index == self.layout.here or not spending.limits:
                    continue
                with suppress(NobodyThere, BrokenOff, msgspec.DecodeError, TimeoutError):
                    async with asyncio.timeout(HEAR_S), self.hops.ask(index, SPENDING) as answer:
                        spending.note_standing(index, msgspec.json.decode(await answer.read(), type=Standing))
            await asyncio.sleep(HEAR_S)

    async def wait_empty(self) -> None:
        """Return once a retired process holds nothing that anybody may still ask for."""
        sessions, log, since = self.gateway.sessions, self.gateway.recorder.log, asyncio.get_running_loop().time()
        while True:
            now = asyncio.get_running_loop().time()
            if sessions.live or log.waiting:
                since = now
            elif now - since >= self.gateway.options.reward_deadline_ms / 1000:
                mark_drain(self.folder, self.layout.here, is_drained=True)
                return
            await asyncio.sleep(1.0)

    async def settle(self, route: list[ProcessWay], body: bytes, *, exact: bool) -> list[ProcessWay]:
        """The way of a call of Responses, which may name what was said before by ids that an upstream gave. Raises
        ApiError 400 where another process knows one of them, which is another caller's therefore. `exact`: these ids
        alone say whose it is."""
        ids = await run_aside(len(body), ids_in, dialects.RESPONSES, body)
        if len({index_of(id) for id in ids} - {None}) < 2 and None not in map(index_of, ids):
            return route
        holders = {
            index: known_ids for index in self.layout.holders if (known_ids := await self._known_ids(index, ids))
        }
        processes = [self.layout.here, *holders] if exact else [way.process for way in route]
        for at, (index, known_ids) in enumerate(holders.items()):
            if index not in processes or at:
                raise _no_response(known_ids[0])
        if holders or exact:
            # Who knows them decides, and nobody else: an upstream would take them from anybody.
            route = [ProcessWay(next(iter(holders), self.layout.here), must_exist=False)]
        return route

    async def _known_ids(self, index: int, ids: list[str]) -> list[str]:
        """Those of the ids that anybody was told at a process. Raises ApiError 503 where that cannot be known."""
        if index == self.layout.here:
            return [id for id in ids if self.gateway.sessions.replies.stored.knows(id)]
        try:
            async with self.hops.ask(index, KNOWN_IDS, "POST", body=msgspec.json.encode(ids)) as answer:
                return msgspec.json.decode(await answer.read(), type=list[str])
        except NobodyThere:
            self.check_absence(ProcessWay(index, must_exist=False))
            return []
        except (BrokenOff, msgspec.DecodeError):
            raise process_down() from None

    def _stays(self, route: list[ProcessWay]) -> bool:
        return route == [ProcessWay(self.layout.here, must_exist=False)] and not self.is_retired

    def caller(self, headers: Headers) -> Caller:
        """Who sends a request; of whoever bears the key of another process's session only that. Raises ApiError 401."""
        key, sessions = key_of(headers), self.gateway.sessions
        if key.startswith(KEY_PREFIX) and (id := sessions.id_of(key)) is not None and sessions.get(id) is None:
            return Caller(ELSEWHERE, None)
        return self.gateway.callers.identify(headers)

    def _listing(self, scope: Scope) -> list[int] | None:
        """The processes that may know sessions of the name that is asked for; None for any other request, and where
        this one alone may."""
        if scope["method"] != "GET" or scope["path"] != "/v1/sessions":
            return None
        name = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("name", [""])[-1]
        counts = (*self.layout.former, self.layout.processes)
        places = sorted({choose_process(f"name {name}", count) for count in counts})
        return None if places == [self.layout.here] else places

    async def events(self, local: Local, headers: Headers, body: bytes) -> AsyncGenerator[bytes, None]:
        """The server-sent events that answer a request of Responses, whose frame came over a WebSocket. `local` answers
        one of this process. Raises ApiError before the first of them."""
        door = at_the_door("POST", dialects.RESPONSES.path, headers)
        evidence = door.evidence if door.reads is None else await run_aside(len(body), in_the_body, door.reads, body)
        exact = door.reads is not None and evidence.exact is not None
        route = await self.settle(ways(evidence, self.layout), body, exact=exact)
        for way in [*route, ProcessWay(self.layout.here, must_exist=False)]:
            try:
                if way.process == self.layout.here:
                    stream = local(
                        Headers(raw=[*headers.raw, _HOLDER_ONLY_HEADER]) if way.must_exist else headers, body
                    )
                else:
                    stream = self._relay_events(way, headers, body)
                with nullcontext() if way.process == self.layout.here else self.relaying():
                    async with aclosing(stream):
                        async for part in stream:
                            yield part
                return
            except NobodyThere:
                self.check_absence(way)
            except ApiError as error:
                if not way.must_exist or error.status not in MISS_STATUSES:
                    raise

    async def _relay_events(self, way: ProcessWay, headers: Headers, body: bytes) -> AsyncGenerator[bytes, None]:
        raw_headers = [(name, value) for name, value in headers.raw if not name.startswith((b":", b"sec-websocket"))]
        raw_headers.append((b"content-type", b"application/json"))
        target = dialects.RESPONSES.path
        if name := headers.get(PATH):
            target = f"{PREFIX}{quote(name.encode('latin-1'), safe='')}{target}"
        rest = b""
        try:
            async with self.hops.ask(way.process, _why(way), "POST", target, raw_headers, body) as answer:
                if answer.status >= 400:
                    raise _error_of(answer.status, answer.headers.get("retry-after"), await answer.read())
                async for part in answer.content.iter_any():
                    # Whoever makes frames of them takes whole events.
                    events, end, rest = (rest + part).rpartition(b"\n\n")
                    if end:
                        yield events + end
        except BrokenOff:
            raise cut_off() from None

    def check_absence(self, way: ProcessWay) -> None:
        """Nobody listens where a request should go. Raises ApiError 503, but where there is nobody any more."""
        if way.process < self.layout.processes or not is_drained(self.folder, way.process):
            raise process_down() from None


class _Passage:
    """One request whose body was read, on its way."""

    def __init__(
        self, crossing: Crossing, inner: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send, visit: Visit
    ) -> None:
        self._crossing = crossing
        self._inner = inner
        self._scope = scope
        self._body = body
        self._receive = receive
        self._send = send
        self._visit = visit
        self._leaving = asyncio.create_task(self._leave())

    async def along(self, route: list[ProcessWay]) -> None:
        """Ask one after the other, until one answers. Raises ApiError."""
        here = self._crossing.layout.here
        try:
            for way in route:
                if way.process == here:
                    if await self._stay(self._send, must_exist=way.must_exist):
                        return
                elif await self._go(way):
                    return
            await self._stay(self._send, must_exist=False)  # whom it belonged to is there no more
        finally:
            self._leaving.cancel()

    async def gather(self, places: list[int]) -> None:
        """Ask all of these for their sessions, and answer with those of all. Raises ApiError."""
        sessions: dict[str, JsonObject] = {}
        try:
            for index in places:
                status, body = await self._list_at(index)
                if status != 200:
                    return await _answer(self._send, status, body)
                sessions |= {one["session"]: one for one in orjson.loads(body)["sessions"]}
        finally:
            self._leaving.cancel()
        # Ids sort by their creation.
        await _answer(self._send, 200, orjson.dumps({"sessions": [sessions[id] for id in sorted(sessions)]}))

    async def _list_at(self, index: int) -> tuple[int, bytes]:
        if index == self._crossing.layout.here:
            parts: list[bytes] = []
            status = 0

            async def take(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                parts.append(message.get("body", b""))

            await self._stay(take, must_exist=False)
            return status, b"".join(parts)
        way = ProcessWay(index, must_exist=False)
        try:
            async with self._ask(way) as answer:
                return answer.status, await answer.read()
        except NobodyThere:
            self._crossing.check_absence(way)
            return 200, b'{"sessions": []}'
        except BrokenOff:
            raise process_down() from None

    async def _leave(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _stay(self, send: Send, *, must_exist: bool) -> bool:
        """Whether this process answers; where it is to begin nothing, it may not."""
        self._visit.close()  # who answers counts it
        body, is_refused = [self._body], False

        async def receive() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await asyncio.shield(self._leaving)
            return {"type": "http.disconnect"}

        async def answer(message: Message) -> None:
            nonlocal is_refused
            if message["type"] == "http.response.start":
                is_refused = must_exist and message["status"] in MISS_STATUSES
            if not is_refused:
                await send(message)

        await self._inner(_for_holder(self._scope) if must_exist else self._scope, receive, answer)
        return not is_refused

    def _ask(self, way: ProcessWay) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        scope = self._scope
        raw = scope.get("raw_path") or quote(scope["path"]).encode()
        query = scope.get("query_string", b"")
        target = raw.decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
        return self._crossing.hops.ask(way.process, _why(way), scope["method"], target, scope["headers"], self._body)

    async def _go(self, way: ProcessWay) -> bool:
        """Whether another process answers. Raises ApiError 503 where it should and does not."""
        relay = asyncio.create_task(self._relay(way))
        try:
            await asyncio.wait([relay, self._leaving], return_when=asyncio.FIRST_COMPLETED)
            if not relay.done():
                logger.info("a client went away before the end of its reply")
                return True
        finally:
            if not relay.done():
                relay.cancel()
                await asyncio.wait([relay])
        try:
            return relay.result()
        except NobodyThere:
            self._crossing.check_absence(way)
            return False
        except OSError:
            if not self._leaving.done():
                raise
            logger.info("a client went away before the end of its reply")
            return True

    async def _relay(self, way: ProcessWay) -> bool:
        with self._crossing.relaying():
            return await self._relay_answer(way)

    async def _relay_answer(self, way: ProcessWay) -> bool:
        has_begun = streams = False
        try:
            async with self._ask(way) as answer:
                if way.must_exist and answer.status in MISS_STATUSES:
                    await answer.read()
                    return False
                if answer.status == MISDIRECTED:  # it is retired
                    raise _no_response("")
                headers = passed_on(answer.raw_headers)
                streams = any(name == b"content-type" and value.startswith(EVENT_STREAM) for name, value in headers)
                has_begun = True
                self._visit.close()  # its body was read by who answers
                await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
                async for part in answer.content.iter_any():
                    await self._send({"type": "http.response.body", "body": part, "more_body": True})
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except (BrokenOff, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._crossing.stopping:
                raise  # the client went away
            if not has_begun:
                raise process_down() from None
            if not streams:
                raise
            # To cut it would look like its end to most clients.
            dialect = dialects.of_path(strip_name(self._scope)["path"])
            await self._send(
                {"type": "http.response.body", "body": dialect.failure_event(cut_off()).sse(), "more_body": False}
            )
        return True


def _why(way: ProcessWay) -> bytes:
    return HOLDER_CALL if way.must_exist else ANY_CALL


def _no_response(id: str) -> ApiError:
    message = f"Previous response with id '{id}' not found." if id else "The previous response is not kept any more."
    return bad_request(message, param="previous_response_id", code="previous_response_not_found")


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _for_holder(scope: Scope) -> Scope:
    return {**scope, "headers": [*scope["headers"], _HOLDER_ONLY_HEADER]}


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _error_of(status: int, retry_after: str | None, body: bytes) -> ApiError:
    """The error that another process answered with."""
    try:
        error = orjson.loads(body)["error"]
        wait = int(retry_after) if retry_after else None
        return ApiError(
            status, error["message"], code=error["code"], param=error["param"], type=error["type"], retry_after_s=wait
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return process_down()
