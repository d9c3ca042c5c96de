"""A server that gives tokens over HTTP, as an engine: what its siblings share. Each says where requests go, how one is
written and how an answer is read.

Idle connections are dropped after 2 s, because servers close them (vLLM after 5) and a request that meets the close is
lost; one lost that way before any answer is sent again. A server that is paused may keep a request waiting or answer
503: both look the same from here, up to `patience_s`."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from millrace.infra.engines.base import Chunk, Engine, LabelSpan, Sampling, Usage
from millrace.infra.engines.bearer import UNAUTHORIZED_STATUS, Bearer
from millrace.infra.engines.http_client import HttpAnswer, HttpClient
from millrace.infra.errors import EngineError, EngineRejected, EngineTimeout, EngineUnavailable
from millrace.schemas.labels import MIXED, is_base

IDLE_S = 2.0
JSON_HEADERS = {"content-type": "application/json"}
HEALTH_S = 5.0
LABEL_S = 10.0
AT_ONCE = 256
"""events of a stream that are read in one go"""
HEAVY = 64 << 10
"""bytes of an answer or an event that take milliseconds to read: they are read beside the loop"""
INTERNAL_ERROR = 500
GRAMMAR_FAULT = "the engine cannot compile this schema, or a pattern in it: ask for a simpler one"
EVENT = b"data: "
END_MARK = b"[DONE]"

Reader = Callable[[bytes], tuple[list[Chunk], Usage | None]]
"""What an answer or an event of a stream says, in the order in which they come. Raises EngineRejected where it is a
refusal, EngineUnavailable where it cannot be read."""


class NoReply(EngineUnavailable):
    """Nothing of an answer came, or the engine says that it cannot take requests now: safe to send again."""


class EngineAbsent(NoReply):
    """Nothing listens: the engine is starting, or gone. As one that answers 503 it takes no calls now."""


class _Pause(NoReply):
    """The engine answered 503, as it does while its weights change: worth waiting for."""


class TokenServer(Engine):
    """Talks to one server.

    `model` is the served model name, None for whatever is served; `api_key` a key or what reads it. `idle_timeout_s`
    bounds the silence between two bytes, a pause of the engine included; `patience_s` bounds how long a request is
    tried again while the engine is paused, `busy_patience_s` how long while it is busy, and `absent_patience_s` (as
    while it is busy, by default) how long while nothing listens there. Create it inside the event loop that uses it."""

    generate_path: str
    """where requests for tokens go"""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | Callable[[], str] | None = None,
        connect_timeout_s: float = 5.0,
        idle_timeout_s: float = 600.0,
        patience_s: float = 20.0,
        busy_patience_s: float = 2.0,
        absent_patience_s: float | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._bearer = Bearer(api_key)
        self._connect_timeout_s = connect_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._patience_s = patience_s
        self._busy_patience_s = min(patience_s, busy_patience_s)
        self._absent_patience_s = self._busy_patience_s if absent_patience_s is None else absent_patience_s
        self._http: HttpClient | None = None
        self._head = b""
        """of requests for tokens"""

    @abstractmethod
    def _reader(self, sampling: Sampling) -> Reader:
        """Who reads the answer to one request."""

    @abstractmethod
    def _lacks_adapter(self, error: EngineRejected) -> bool:
        """Whether a request was refused for want of the adapter that it names."""

    async def health(self) -> bool:
        try:
            return (await self._get("/health", HEALTH_S))[0] == 200
        except (OSError, ValueError):
            return False

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    # ------------------------------------------------------------------ one request

    async def _relabel(self, chunks: AsyncGenerator[Chunk, None], adapter: str) -> AsyncGenerator[Chunk, None]:
        """What an adapter sampled, labelled as its version. An adapter that is gone is an engine that is not ready."""
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    chunk.spans = adapter_spans(chunk.spans, adapter)
                    yield chunk
        except EngineRejected as error:
            if not self._lacks_adapter(error):
                raise
            raise EngineUnavailable(f"{self.url} has no adapter {adapter} any more, or not yet: {error}") from error

    async def _read_all(self, body: bytes, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        answer = await self._send(body)
        read = self._reader(sampling)
        try:
            data = await answer.read()
            chunks, usage = read(data) if len(data) < HEAVY else await asyncio.to_thread(read, data)
        except TimeoutError as error:
            raise self._silence() from error
        except OSError as error:
            raise EngineUnavailable(f"{self.url} broke off its answer: {explain(error)}") from error
        finally:
            answer.close()
        ends = sum(chunk.finish_reason is not None for chunk in chunks)
        if ends != sampling.n:
            raise EngineUnavailable(f"{self.url} answered {ends} of {sampling.n} choices")
        for position, chunk in enumerate(chunks, 1):
            if position == len(chunks):
                chunk.usage = usage
            yield chunk

    async def _stream(self, body: bytes, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        answer = await self._send(body)
        read = self._reader(sampling)
        ends = 0
        last: Chunk | None = None  # the final chunk of the last choice waits for the usage, which may come behind it
        total: Usage | None = None
        complete = False
        try:
            rest = b""
            while data := await answer.take():
                events = (rest + data if rest else data).split(b"\n\n")
                rest = events.pop()
                by_choice: dict[int, Chunk] = {}  # what came at once leaves at once: one chunk a choice
                for at, event in enumerate(events, 1):
                    if at % AT_ONCE == 0:
                        for chunk in by_choice.values():
                            yield chunk
                        by_choice = {}
                        await asyncio.sleep(0)  # a long reply that lay ready must not keep others waiting
                    if not event.startswith(EVENT):
                        continue  # a comment that keeps the connection alive
                    payload = event[len(EVENT) :]
                    if payload == END_MARK:
                        complete = True
                        continue
                    try:
                        is_light = len(payload) < HEAVY
                        chunks, usage = read(payload) if is_light else await asyncio.to_thread(read, payload)
                    except EngineError:
                        for chunk in by_choice.values():  # what came before the fault was sampled
                            yield chunk
                        raise
                    total = usage or total
                    for chunk in chunks:
                        ends += chunk.finish_reason is not None
                        so_far = by_choice.setdefault(chunk.index, chunk)
                        if so_far is not chunk:
                            so_far.extend(chunk)
                        if ends == sampling.n:
                            last = by_choice.pop(chunk.index)
                for chunk in by_choice.values():
                    yield chunk
            if not complete or last is None:
                raise EngineUnavailable(f"{self.url} ended its stream after {ends} of {sampling.n} choices")
            last.usage = total
            yield last
        except TimeoutError as error:
            raise self._silence() from error
        except OSError as error:
            raise EngineUnavailable(f"{self.url} broke off its stream: {explain(error)}") from error
        finally:
            # closing an answer that has not ended is what tells the engine to drop its request
            answer.close()

    # ------------------------------------------------------------------ connection

    def _client(self) -> HttpClient:
        if self._http is None:
            self._http = HttpClient(
                self.url, connect_s=self._connect_timeout_s, idle_s=IDLE_S, silence_s=self._idle_timeout_s
            )
        return self._http

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. Raises OSError, TimeoutError too."""
        client = self._client()
        head = client.head("GET", path, self._bearer.headers)
        async with asyncio.timeout(timeout_s):
            answer = await (await client.connect()).ask(head)
            try:
                return answer.status, await answer.read()
            finally:
                answer.close()

    async def _send(self, body: bytes) -> HttpAnswer:
        """The answer, once its status is 200. Tries again while the engine has not begun one."""
        try:
            return await self._send_once(body)
        except NoReply:
            if max(self._patience_s, self._absent_patience_s) <= 0:
                raise
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(NoReply),
            stop=self._waited_enough,
            wait=wait_random_exponential(0.05, max=2.0),
            reraise=True,
        ):
            with attempt:
                return await self._send_once(body)
        raise AssertionError("tenacity either returns or raises")

    def _waited_enough(self, state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome is not None else None
        match error:
            case _Pause():
                patience_s = self._patience_s
            case EngineAbsent():
                patience_s = self._absent_patience_s
            case _:
                patience_s = self._busy_patience_s
        return (state.seconds_since_start or 0.0) >= patience_s

    async def _send_once(self, body: bytes) -> HttpAnswer:
        key = self._bearer.key
        answer = await self._post(body)
        if answer.status == UNAUTHORIZED_STATUS and self._bearer.renew(key):
            answer.close()
            self._head = b""
            answer = await self._post(body)
        if answer.status == 200:
            return answer
        try:
            raise refusal(answer.status, await answer.read(), self.url, answer.headers.get("retry-after", ""))
        except OSError as error:
            raise EngineUnavailable(f"{self.url} answered {answer.status} and broke off") from error
        finally:
            answer.close()

    async def _post(self, body: bytes) -> HttpAnswer:
        try:
            client = self._client()
            self._head = self._head or client.head("POST", self.generate_path, JSON_HEADERS | self._bearer.headers)
            connection = await client.connect()
        except (OSError, ValueError) as error:
            raise EngineAbsent(
                f"cannot connect to {self.url}: {explain(error)}; is the engine up?", status=503
            ) from error
        try:
            return await connection.ask(self._head, body)
        except TimeoutError as error:
            raise self._silence() from error
        except OSError as error:
            raise NoReply(f"{self.url} closed the connection: {explain(error)}") from error

    def _silence(self) -> EngineTimeout:
        return EngineTimeout(f"{self.url} sent nothing for {self._idle_timeout_s} s")


def adapter_spans(spans: Sequence[LabelSpan], adapter: str) -> tuple[LabelSpan, ...]:
    """The spans of what an adapter sampled, from those of the weights under it, which must have been one base."""
    labels = {span.label for span in spans}
    sure = len(labels) == 1 and is_base(*labels)
    return tuple(LabelSpan(adapter if sure else MIXED, span.start, span.end) for span in spans)


def refusal(status: int, body: bytes, url: str, retry_after: str = "") -> EngineRejected | EngineUnavailable:
    """What an answer of this status, or an event that bears it, means."""
    try:
        message = str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = body[:300].decode(errors="replace")
    if 400 <= status < 500 and status not in (408, 425, 429):
        return EngineRejected(f"the engine refused the request ({status}): {message}", status)
    kind = _Pause if status == 503 else NoReply if status in (408, 425, 429, 502, 504) else EngineUnavailable
    wait = int(retry_after) if retry_after.isdecimal() and len(retry_after) < 6 else None
    return kind(f"{url} failed ({status}): {message}", status=status, retry_after_s=wait)


def explain(error: BaseException) -> str:
    """An error in words, also one that has none."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
