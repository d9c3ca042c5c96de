"""vLLM as an engine, over `POST /inference/v1/generate` (start it with `--enable-scale-out`).

Idle connections are dropped after 2 s, because vLLM closes them after 5 and a request that meets the close is lost; one
lost that way before any answer is sent again.

vLLM 0.32 queues requests while paused and 0.33 answers 503: both look the same from here, up to `patience_s`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from millrace.infra.engines.base import Chunk, Engine, Sampling, Usage
from millrace.infra.engines.bearer import UNAUTHORIZED_STATUS, Bearer
from millrace.infra.engines.http_client import HttpAnswer, HttpClient
from millrace.infra.engines.vllm.wire import (
    Message,
    MessageWithTop,
    adapter_spans,
    plain_decoder,
    request_body,
    to_chunk,
    to_usage,
    top_decoder,
)
from millrace.infra.errors import EngineError, EngineRejected, EngineTimeout, EngineUnavailable

IDLE_S = 2.0
JSON_HEADERS = {"content-type": "application/json"}
GENERATE = "/inference/v1/generate"
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


class _NoAnswer(EngineUnavailable):
    """Nothing of an answer came, or the engine says that it cannot take requests now: safe to send again."""


class _Absent(_NoAnswer):
    """Nothing listens: the engine is starting, or gone. As one that answers 503 it takes no calls now."""


class _Pause(_NoAnswer):
    """The engine answered 503, as it does while its weights change: worth waiting for."""


class VllmEngine(Engine):
    """Talks to one vLLM server (or to `millrace.infra.engines.inprocess.server`).

    `model` is the served model name, None for whatever is served; `api_key` a key or what reads it. `idle_timeout_s`
    bounds the silence between two bytes, a pause of the engine included; `patience_s` bounds how long a request is
    tried again while the engine is paused, `busy_patience_s` how long while it is busy, and `absent_patience_s` (as
    while it is busy, by default) how long while nothing listens there. Create it inside the event loop that uses it."""

    kind = "vllm"

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

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, stream: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        adapter = self.adapter
        body = request_body(adapter or self.model, prompt_ids, sampling, request_id, stream)
        chunks = self._stream(body, sampling) if stream else self._read_all(body, sampling)
        if adapter is not None:
            chunks = self._relabel(chunks, adapter)
        return chunks if sampling.grammar is None else self._guard_grammar(chunks, prompt_ids, request_id)

    async def health(self) -> bool:
        try:
            return (await self._get("/health", HEALTH_S))[0] == 200
        except (OSError, ValueError):
            return False

    async def weight_version(self) -> str:
        try:
            status, body = await self._get("/weight_info", LABEL_S)
            if status != 200:
                raise _refusal(status, body, self.url)
            return str(orjson.loads(body)["weight_version"])
        except (OSError, ValueError) as error:
            raise EngineUnavailable(f"{self.url} does not tell its weight version: {_say(error)}") from error

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
            if error.status != 404:
                raise
            raise EngineUnavailable(f"{self.url} has no adapter {adapter} any more, or not yet: {error}") from error

    async def _guard_grammar(
        self, chunks: AsyncGenerator[Chunk, None], prompt_ids: Sequence[int], request_id: str
    ) -> AsyncGenerator[Chunk, None]:
        """What is sampled under a grammar. vLLM answers 500 to one that it cannot compile, as to a fault of its own:
        where it samples a token without the grammar, that is at fault. Raises EngineRejected then."""
        is_begun = False
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    is_begun = True
                    yield chunk
        except EngineUnavailable as error:
            if is_begun or error.status != INTERNAL_ERROR or not await self._can_sample(prompt_ids, request_id):
                raise
            raise EngineRejected(GRAMMAR_FAULT, 400) from error

    async def _can_sample(self, prompt_ids: Sequence[int], request_id: str) -> bool:
        one = Sampling(1)
        body = request_body(self.adapter or self.model, prompt_ids, one, f"{request_id}-free", stream=False)
        try:
            return [chunk async for chunk in self._read_all(body, one)] != []
        except EngineError:
            return False

    async def _read_all(self, body: bytes, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        answer = await self._send(body)
        try:
            data = await answer.read()
            if len(data) < HEAVY:
                chunks, usage = self._parse(data, sampling)
            else:
                chunks, usage = await asyncio.to_thread(self._parse, data, sampling)
        except TimeoutError as error:
            raise self._silence() from error
        except OSError as error:
            raise EngineUnavailable(f"{self.url} broke off its answer: {_say(error)}") from error
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
        ends = 0
        last: Chunk | None = None  # the final chunk of the last choice waits for the usage, sent right behind it
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
                        if len(payload) < HEAVY:
                            chunks, usage = self._parse(payload, sampling)
                        else:
                            chunks, usage = await asyncio.to_thread(self._parse, payload, sampling)
                    except EngineError:
                        for chunk in by_choice.values():  # what came before the fault was sampled
                            yield chunk
                        raise
                    if usage is not None and last is not None:
                        last.usage = usage
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
            yield last
        except TimeoutError as error:
            raise self._silence() from error
        except OSError as error:
            raise EngineUnavailable(f"{self.url} broke off its stream: {_say(error)}") from error
        finally:
            # closing an answer that has not ended is what tells the engine to drop its request
            answer.close()

    def _parse(self, data: bytes, sampling: Sampling) -> tuple[list[Chunk], Usage | None]:
        """What an answer or an event says."""
        top, n = sampling.top_logprobs, sampling.n
        message: Message | MessageWithTop
        try:
            message = top_decoder.decode(data) if top else plain_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineUnavailable(f"{self.url} sent no JSON that we know: {error}") from error
        if message.error is not None:
            raise _refusal(message.error.code or 500, data, self.url)
        try:
            chunks = [to_chunk(choice, top, n) for choice in message.choices]
        except ValueError as error:
            raise EngineUnavailable(f"{self.url} sent an answer that cannot be trained on: {error}") from error
        return chunks, None if message.usage is None else to_usage(message.usage)

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
        except _NoAnswer:
            if max(self._patience_s, self._absent_patience_s) <= 0:
                raise
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(_NoAnswer),
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
            case _Absent():
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
            raise _refusal(answer.status, await answer.read(), self.url, answer.headers.get("retry-after", ""))
        except OSError as error:
            raise EngineUnavailable(f"{self.url} answered {answer.status} and broke off") from error
        finally:
            answer.close()

    async def _post(self, body: bytes) -> HttpAnswer:
        try:
            client = self._client()
            self._head = self._head or client.head("POST", GENERATE, JSON_HEADERS | self._bearer.headers)
            connection = await client.connect()
        except (OSError, ValueError) as error:
            raise _Absent(f"cannot connect to {self.url}: {_say(error)}; is the engine up?", status=503) from error
        try:
            return await connection.ask(self._head, body)
        except TimeoutError as error:
            raise self._silence() from error
        except OSError as error:
            raise _NoAnswer(f"{self.url} closed the connection: {_say(error)}") from error

    def _silence(self) -> EngineTimeout:
        return EngineTimeout(f"{self.url} sent nothing for {self._idle_timeout_s} s")


def _refusal(status: int, body: bytes, url: str, retry_after: str = "") -> EngineRejected | EngineUnavailable:
    try:
        message = str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = body[:300].decode(errors="replace")
    if 400 <= status < 500 and status not in (408, 425, 429):
        return EngineRejected(f"the engine refused the request ({status}): {message}", status)
    kind = _Pause if status == 503 else _NoAnswer if status in (408, 425, 429, 502, 504) else EngineUnavailable
    wait = int(retry_after) if retry_after.isdecimal() and len(retry_after) < 6 else None
    return kind(f"{url} failed ({status}): {message}", status=status, retry_after_s=wait)


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
