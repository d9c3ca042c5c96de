"""An upstream of one API that answers in another: who asks it need not know.

Invariants: a streamed reply ends as its API wants it only where the upstream's own came to its end, and breaks off
otherwise; a refusal keeps its status and its words, in the shape of the client's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence

import orjson

from millrace.dialects import all as dialects
from millrace.dialects import shape
from millrace.dialects.answers import error_in
from millrace.dialects.base import Dialect, ReplyStream, StreamEvent
from millrace.dialects.conversation import Ask
from millrace.dialects.errors import ApiError
from millrace.dialects.stored_responses import Recaller, no_recall
from millrace.dialects.translation.base import ReplyFacts, Translator, parts_of
from millrace.dialects.translation.reply import TranslatedCall
from millrace.infra.engines.upstream import NO_HEADERS, StreamedReply, TextServer, UpstreamReply, is_success
from millrace.infra.errors import EngineUnavailable
from millrace.infra.process.offload import run_aside
from millrace.schemas import bounds
from millrace.schemas.json_values import Json

JSON = "application/json"
PIECE = 8 << 10
"""bytes of a stream that are heard in one go"""


class Interpreter(TextServer):
    """`server`, which speaks the API of `translator`, for clients of `dialect`, who may name what is `recaller`."""

    def __init__(
        self, server: TextServer, translator: Translator, dialect: Dialect, recaller: Recaller = no_recall
    ) -> None:
        self.base_url = server.base_url
        self._server = server
        self._translator = translator
        self._spoken = dialect
        self._recalled = recaller

    async def ask(self, path: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> UpstreamReply:
        """The answer in the client's API, and in no other, whatever `path` says. Raises ApiError 400 for a request
        that the upstream's API has no words for, or that names what its caller was never told, EngineUnavailable also
        for an answer that is none of its API."""
        ask, request_body = await run_aside(len(body), self._request, body)
        answer = await self._server.ask(*self._place(request_body, headers))
        if not is_success(answer.status):
            return self.refusal(answer)
        body = await run_aside(len(answer.body), self._convert, ask, answer.body)
        return UpstreamReply(answer.status, answer.headers, body)

    async def stream(self, path: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> StreamedReply:
        """The same, streamed."""
        ask, request_body = await run_aside(len(body), self._request, body)
        answer = await self._server.stream(*self._place(request_body, headers))
        return InterpretedReply(answer, self, ask, self._translator, self._spoken)

    async def send(self, method: str, path: str, headers: Mapping[str, str] = NO_HEADERS) -> UpstreamReply:
        """The server's own answer: it keeps nothing in the client's API."""
        return await self._server.send(method, path, headers)

    async def close(self) -> None:
        """Let go of every connection. Idempotent."""
        await self._server.close()

    def _request(self, body: bytes) -> tuple[Ask, bytes]:
        ask = self._spoken.understand(body, self._recalled).request
        return ask, _encode(self._translator.request(ask))

    def _place(self, request_body: bytes, headers: Mapping[str, str]) -> tuple[str, bytes, dict[str, str]]:
        """Where a request goes, and with which headers: those of the client's API mean nothing there."""
        client_headers = {
            name: text for name, text in headers.items() if not name.startswith(("anthropic-", "openai-"))
        }
        return self._translator.path, request_body, {**client_headers, **self._translator.headers}

    def _convert(self, ask: Ask, body: bytes) -> bytes:
        response = shape.object_in(body)
        words = error_in(response or {})
        if response is None or dialects.writer_of(response) is not self._translator.dialect:
            message = f"{self.base_url} gave an answer that is none of {self._translator.name}"
            raise EngineUnavailable(message, status=200, received=len(body), words=words)
        try:
            answer, stop = self._translator.whole(response)
        except EngineUnavailable as error:
            message = f"{self.base_url} gave a reply that failed"
            raise EngineUnavailable(message, status=200, received=len(body), words=error.words) from None
        if not answer.choices:
            message = f"{self.base_url} gave an answer without a reply"
            raise EngineUnavailable(message, status=200, received=len(body), words=words)
        facts = ReplyFacts(answer.id, answer.usage, answer.choices[0].finish, stop)
        call = TranslatedCall(ask, self._spoken.prefix, facts)
        call.choice.say(parts_of(answer))
        call.end()
        return self._spoken.whole(call, call.choices)

    def refusal(self, answer: UpstreamReply) -> UpstreamReply:
        """A refusal in the client's words."""
        message = self._translator.error(answer.body) or f"The upstream answered with status {answer.status}"
        kind = "server_error" if answer.status >= 500 else "invalid_request_error"
        error = ApiError(answer.status, message, type=kind)
        return UpstreamReply(answer.status, {**answer.headers, "content-type": JSON}, self._spoken.error(error))


class InterpretedReply(StreamedReply):
    """A streamed answer in the client's API."""

    def __init__(
        self, answer: StreamedReply, interpreter: Interpreter, ask: Ask, translator: Translator, dialect: Dialect
    ) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self._answer = answer
        self._interpreter = interpreter
        self._ask = ask
        self._translator = translator
        self._spoken = dialect
        self._facts = ReplyFacts()

    @property
    def usage_so_far(self) -> tuple[int, int, int] | None:
        """As the upstream counted, whatever its client wants to be told of it."""
        return self._facts.usage if any(self._facts.usage) else None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Events of the client's API. Raises EngineUnavailable or EngineTimeout when the upstream's break off."""
        listener = self._translator.listener()
        self._facts = listener.told
        call = TranslatedCall(self._ask, self._spoken.prefix, listener.told)
        writer: ReplyStream | None = None  # made when the upstream has said its id
        url, size = self._interpreter.base_url, 0
        async for data in self._translator.dialect.as_stream(self._answer.chunks()):
            size += len(data)
            if size > bounds.REPLY_BYTES:
                raise EngineUnavailable(f"{url} streams more than {bounds.REPLY_BYTES} bytes")
            for at in range(0, len(data), PIECE):
                if parts := call.choice.say(listener.hear(data[at : at + PIECE])):
                    writer = writer or self._spoken.stream_writer(call)
                    if events := writer.take(call.choice, parts, 0):
                        yield _join_events(events)
                if len(data) > PIECE:
                    await asyncio.sleep(0)  # others have their turn
            if listener.error:
                raise EngineUnavailable(f"{url} ended its answer with an error", words=listener.error)
            if listener.unread:
                name = self._translator.name
                raise EngineUnavailable(f"{url} sent an event that is none of {name}, or is beyond the limits")
        if not listener.closing:
            raise EngineUnavailable(f"{url} broke off its answer before the end")
        writer = writer or self._spoken.stream_writer(call)
        rest = writer.take(call.choice, parts, 0) if (parts := call.choice.say(listener.end())) else []
        call.end()
        yield _join_events([*rest, *writer.end()])

    async def read_all(self) -> UpstreamReply:
        """A refusal in the client's words."""
        return self._interpreter.refusal(await self._answer.read_all())

    def close(self) -> None:
        """Let go of the connection."""
        self._answer.close()


def _encode(request: Mapping[str, Json]) -> bytes:
    try:
        return orjson.dumps(request)
    except TypeError:  # a schema with an integer of more than 64 bits
        return json.dumps(request).encode()


def _join_events(events: Sequence[StreamEvent]) -> bytes:
    return b"".join(event.sse() for event in events)
