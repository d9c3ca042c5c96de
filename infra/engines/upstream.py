"""An upstream that gives text and no token ids: any server of an API that the gateway speaks, passed through byte for
byte.

Invariants: nothing that comes from here may be trained on by RL: there are no token ids, no log-probabilities of them
and no weight versions, and none are made up; a whole answer is read piece by piece up to a bound, however small it was
before it was decompressed; what an answer sets, as cookies, goes with no other call."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp

from millrace.infra.errors import EngineTimeout, EngineUnavailable
from millrace.schemas import bounds

UNTRAINABLE = "the upstream gives text without token ids"
"""the reason that calls through here carry in the record"""

NOT_WHOLE = "it goes on from a response that is not known here"
"""`opened` of a call whose record lacks what its model read before: the request names it, and only the upstream has
it"""

IDLE_S = 2.0
PASSED_ON = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id", "request-id")
"""headers of an answer that its client gets, beside those of `FAMILIES`"""
FAMILIES = ("openai-", "anthropic-", "x-ratelimit-")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
STATUSES = range(200, 1000)
"""of an answer; what is below is the beginning of another"""
NO_HEADERS: Mapping[str, str] = {}


class Longest(NamedTuple):
    """Bytes of a whole answer: of a success, of a refusal."""

    reply: int = bounds.REPLY_BYTES
    refusal: int = bounds.REFUSAL_BYTES


LONGEST = Longest()


def is_success(status: int) -> bool:
    """Whether an answer of this status is what was asked for."""
    return 200 <= status < 300


@dataclass(frozen=True, slots=True)
class UpstreamReply:
    """What the upstream answered, refusals included: status, headers worth passing on, the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class StreamedReply(ABC):
    """An answer whose body is still coming. Iterate `chunks` once, or call `whole`, inside `async with`; leaving closes
    it."""

    status: int
    headers: Mapping[str, str]

    @property
    def usage_so_far(self) -> tuple[int, int, int] | None:
        """Tokens of the prompt, of the reply and of those that were cached, as far as the server told them so far; None
        where the body says what is known."""
        return None

    @abstractmethod
    def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes, cut anywhere. Raises EngineUnavailable or EngineTimeout when it breaks off."""

    @abstractmethod
    async def read_all(self) -> UpstreamReply:
        """The answer with all of its body. Raises EngineUnavailable also for one that is too long."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connection. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HttpReply(StreamedReply):
    """One that comes by HTTP, from `url`."""

    def __init__(self, answer: aiohttp.ClientResponse, url: str, idle_s: float, longest: Longest = LONGEST) -> None:
        self.status = answer.status
        self.headers = _headers(answer)
        self._answer = answer
        self._url = url
        self._idle_s = idle_s
        self._longest = longest

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            async for data in self._answer.content.iter_any():
                yield data
        except TimeoutError as error:
            raise EngineTimeout(f"{self._url} sent nothing for {self._idle_s} s") from error
        except aiohttp.ClientError as error:
            text = f"{self._url} broke off its answer: {error or type(error).__name__}"
            raise EngineUnavailable(text, status=None if is_success(self.status) else self.status) from error

    async def read_all(self) -> UpstreamReply:
        longest = self._longest.reply if is_success(self.status) else self._longest.refusal
        body = bytearray()
        try:
            async for part in self.chunks():
                body += part
                if len(body) > longest:
                    # With its status: another try would bring as much, and cost as much.
                    text = f"{self._url} answered {self.status} with more than {longest} bytes"
                    raise EngineUnavailable(text, status=self.status)
                await asyncio.sleep(0)  # others have their turn
        except (EngineUnavailable, EngineTimeout) as error:
            error.received = len(body) if is_success(self.status) else 0
            raise
        return UpstreamReply(self.status, self.headers, bytes(body))

    def close(self) -> None:
        self._answer.close()


class TextServer(ABC):
    """Who answers calls with text. `base_url` is where it is, in records."""

    base_url: str

    @abstractmethod
    async def ask(self, path: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> UpstreamReply:
        """POST to a path below the base url, whole, with these headers beside our own. A refusal is a reply too; raises
        EngineUnavailable and EngineTimeout."""

    @abstractmethod
    async def stream(self, path: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> StreamedReply:
        """The same of a body that asks for a stream: returns once the status is known."""

    @abstractmethod
    async def send(self, method: str, path: str, headers: Mapping[str, str] = NO_HEADERS) -> UpstreamReply:
        """A request without a body, as `ask`: about what the server keeps itself."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of every connection. Idempotent."""


class TextUpstream(TextServer):
    """The server at `base_url` (with its /v1), with our own key for it: the caller's is never passed on. The key is a
    bearer's, or stands in `key_header` as it is.

    Create it inside the event loop that uses it."""

    def __init__(
        self,
        base_url: str,
        api_key: str = "",
        *,
        key_header: str = "authorization",
        connect_timeout_s: float = 5.0,
        idle_s: float = 600.0,
        longest: Longest = LONGEST,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers[key_header] = f"Bearer {api_key}" if key_header == "authorization" else api_key
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=idle_s)
        self._idle_s = idle_s
        self._longest = longest
        self._session: aiohttp.ClientSession | None = None

    async def chat(self, body: bytes) -> UpstreamReply:
        """POST /chat/completions, whole. A refusal is a reply too; raises EngineUnavailable and EngineTimeout."""
        return await self._fetch("POST", "/chat/completions", body)

    async def ask(self, path: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> UpstreamReply:
        return await self._fetch("POST", path, body, headers)

    async def send(self, method: str, path: str, headers: Mapping[str, str] = NO_HEADERS) -> UpstreamReply:
        return await self._fetch(method, path, None, headers)

    async def models(self) -> UpstreamReply:
        """GET /models. Raises what `ask` does."""
        return await self._fetch("GET", "/models", None)

    async def stream_chat(self, body: bytes) -> StreamedReply:
        """POST /chat/completions of a body that asks for a stream: returns once the status is known."""
        return await self.stream("/chat/completions", body)

    async def stream(self, path: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> StreamedReply:
        return await self._send("POST", path, body, headers)

    async def health(self) -> bool:
        """Whether it answers at all."""
        try:
            return (await self.models()).status < 500
        except (EngineUnavailable, EngineTimeout):
            return False

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _fetch(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] = NO_HEADERS
    ) -> UpstreamReply:
        async with await self._send(method, path, body, headers) as answer:
            return await answer.read_all()

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] = NO_HEADERS
    ) -> StreamedReply:
        # never sent twice: an upstream may charge for a request whose answer was lost
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
            )
        try:
            # A redirect is an answer like any other: our key goes to no other address.
            answer = await self._session.request(
                method, f"{self.base_url}{path}", data=body, headers=headers, allow_redirects=False
            )
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnavailable(f"cannot connect to {self.base_url}: {error}") from error
        except TimeoutError as error:
            raise EngineTimeout(f"{self.base_url} sent nothing for {self._idle_s} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self.base_url} does not answer: {error or type(error).__name__}") from error
        if answer.status not in STATUSES:
            answer.close()
            raise EngineUnavailable(f"{self.base_url} answers with status {answer.status}")
        return HttpReply(answer, self.base_url, self._idle_s, self._longest)


def _headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    headers = {name.lower(): text for name, text in answer.headers.items()}
    forwards = {name: text for name, text in headers.items() if name in PASSED_ON or name.startswith(FAMILIES)}
    return {name: value for name, text in forwards.items() if (value := header_value(text)) is not None}


def header_value(text: str) -> str | None:
    """A header's value, which came as UTF-8 or as nobody knows what, with a character for each of its bytes, as servers
    take it; None for what no header may have."""
    value = text.encode(errors="surrogateescape").decode("latin-1")
    return value if not _CONTROL.search(value) else None
