"""The seam between an API and the gateway: what every dialect does.

A sibling is a `Dialect`, its `ReplyStream`, its `DialectReader`, and an entry in
`millrace.dialects.all`: routes, the choices of settings, and who answers an error follow from that
entry.

Invariants: `parse` raises nothing but ApiError, whatever the bytes; a reply says the same words whole and streamed; the
recorded response alone tells which dialect wrote it, so that a session is rebuilt from the capture log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from starlette.responses import Response

from millrace.dialects import shape
from millrace.dialects.answers import error_in
from millrace.dialects.conversation import Ask, Part
from millrace.dialects.errors import ApiError
from millrace.dialects.reading.events import LARGEST
from millrace.dialects.reading.head import RequestHead
from millrace.dialects.reading.reader import DialectReader, RecordedCall
from millrace.dialects.stored_responses import Recall, Recaller, StoredResponse
from millrace.dialects.writable import WritableCall, WritableChoice
from millrace.infra.errors import EngineError
from millrace.infra.process.offload import run_aside
from millrace.schemas.json_values import Json


class StreamEvent(NamedTuple):
    """One event of a streamed reply. `name` is "" in an API whose events have none; `data` is one line."""

    name: str
    data: bytes

    def sse(self) -> bytes:
        """As a server-sent event."""
        if not self.name:
            return b"data: %b\n\n" % self.data
        return b"event: " + self.name.encode() + b"\ndata: " + self.data + b"\n\n"


class WholeRequest(NamedTuple):
    """A request that is whole in itself, its body as the log has it, and the earlier responses that it named."""

    request: Ask
    body: bytes
    used: Sequence[StoredResponse] = ()


class ReplyStream(ABC):
    """Writes one reply while it is sampled."""

    @abstractmethod
    def take(self, choice: WritableChoice, parts: Sequence[Part], tokens: int) -> list[StreamEvent]:
        """What the last `tokens` tokens of a choice added, which may be nothing yet: pieces of Text, Thinking and
        ToolUses, the end of a ToolUse as itself."""

    @abstractmethod
    def end(self) -> list[StreamEvent]:
        """The end of the response, where every choice has come to its own."""


class SideRequest(NamedTuple):
    """A request that is no call of a model, and what a dialect may ask of the gateway to answer it.

    `recall` gives the responses that its caller may name, `count_tokens` how many tokens the prompt of a request has
    that a parser reads, `delete` makes a response one that nobody may name. `id` is what its path names, "" where it
    names nothing; `query` are the parameters of its path."""

    recall: Callable[[], Recall]
    count_tokens: Callable[[Callable[[bytes], Ask], bytes], Awaitable[int]]
    delete: Callable[[str], Awaitable[None]]
    id: str
    body: bytes
    query: Mapping[str, str] = {}


class SideRoute(NamedTuple):
    """A route of an API beside that of its calls. `below`: its path behind the dialect's; `answer` gives the body of
    the response, or raises ApiError."""

    below: str
    method: str
    name: str
    answer: Callable[[SideRequest], Awaitable[bytes]]


class Dialect(ABC):
    """One API."""

    name: str
    """in settings, in pages and as the name of its route"""
    path: str
    """of its route"""
    prefix: str
    """of the ids of its responses"""
    unknown = "Unrecognized request argument supplied: {}"
    """what a strict gateway says of a field that the API does not have"""
    names_in = ""
    """the field of its requests that names a conversation, where it has one"""
    keep_alive = b": keep-alive\n\n"
    """what a stream is sent while its next event takes long"""
    reader: type[DialectReader]
    """how its calls to an upstream are read for the log"""

    @property
    def beside(self) -> Sequence[SideRoute]:
        """Its other routes."""
        return ()

    def keeper(self, asking: SideRequest) -> str | None:
        """The upstream that keeps what a request names, and answers it; None where nothing is kept elsewhere. Raises
        ApiError 403."""
        return None

    @abstractmethod
    def parse(self, body: bytes) -> Ask:
        """The request. Raises ApiError 400 for what is no JSON, has wrong types, or asks for what is not served."""

    def refers(self, body: bytes) -> bool:
        """Whether a request may name what was said before, so that it says more than its bytes show."""
        return False

    def named_in(self, body: bytes) -> list[str]:
        """The ids by which a request names what was said before, the most telling first. Raises ApiError 400."""
        return []

    def understand(self, body: bytes, recaller: Recaller) -> WholeRequest:
        """`parse`, with what a request names by an id in its place. Raises ApiError, also for an id that its caller
        was never told."""
        return WholeRequest(self.parse(body), body)

    @abstractmethod
    def whole(self, call: WritableCall, choices: Sequence[WritableChoice]) -> bytes:
        """The response with these choices of a call that is at its end."""

    def record(self, call: WritableCall, choice: WritableChoice) -> bytes:
        """The response with one choice alone, as its record holds it: all that `read` needs."""
        return self.whole(call, [choice])

    @abstractmethod
    def stream_writer(self, call: WritableCall) -> ReplyStream:
        """The writer of a streamed reply."""

    @abstractmethod
    def events_of(self, response: Mapping[str, Json]) -> list[StreamEvent]:
        """The stream that says what a server's whole response of this API says; nothing for one that says nothing."""

    async def as_stream(self, parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """A server's answer to a request for a stream, as it comes. Some send JSON in its place: a reply or an error
        comes as the events that say the same, anything else as it is. Raises EngineError where `parts` do."""
        first, body = b"", bytearray()
        try:
            async for part in parts:
                first = first or part.lstrip()[:1]
                if first != b"{":
                    yield part
                    continue
                body += part
                if len(body) > LARGEST:
                    first = b"?"
                    yield bytes(body)
                    body.clear()
            if body:
                yield await run_aside(len(body), self._events_in, bytes(body))
        except EngineError:
            if body:
                yield bytes(body)
            raise

    def _events_in(self, body: bytes) -> bytes:
        response = shape.object_in(body) or {}
        if not (events := self.events_of(response)) and (message := error_in(response)):
            events = [self.failure_event(ApiError(502, message, type="server_error", code="engine_unavailable"))]
        return b"".join(event.sse() for event in events) or body

    @abstractmethod
    def error(self, error: ApiError) -> bytes:
        """An error as JSON."""

    def failure_event(self, error: ApiError) -> StreamEvent:
        """An error behind the first event of a stream. Cutting the stream would look like its end to most clients."""
        return StreamEvent("", self.error(error))

    def names(self, head: RequestHead) -> tuple[tuple[object, ...], str | None]:
        """What a request to an upstream says of its end user, and what it calls the conversation."""
        return (head.user, head.safety_identifier), None

    @abstractmethod
    def wrote(self, response: Mapping[str, Json]) -> bool:
        """Whether a recorded response is one of this dialect's."""

    @abstractmethod
    def read(self, request: bytes, response: Mapping[str, Json]) -> RecordedCall:
        """What a recorded call said. Raises ApiError or ValueError for a request that is none."""

    def responses(self, call: WritableCall) -> tuple[bytes, list[bytes]]:
        """The whole response, and for each choice the response that its record holds.

        Records of several choices hold their own alone: all of all would grow with the square of their number."""
        response = self.whole(call, call.choices)
        return response, [response] if len(call.choices) == 1 else [
            self.record(call, choice) for choice in call.choices
        ]

    def refusal(self, error: ApiError) -> Response:
        """An error as a response."""
        return error.response(self.error(error))
