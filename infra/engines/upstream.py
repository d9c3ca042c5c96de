"""An upstream that gives text and no token ids: any server of an API that the gateway speaks, passed through byte for
byte.

Invariant: nothing that comes from here may be trained on by RL: there are no token ids, no log-probabilities of them
and no weight versions, and none are made up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp

from millrace.infra.errors import EngineTimeout, EngineUnavailable

UNTRAINABLE = "the upstream gives text without token ids"
"""the reason that calls through here carry in the record"""

IDLE_S = 2.0
PASSED_ON = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id", "request-id")
"""headers of an answer that its client gets, beside those of `FAMILIES`"""
FAMILIES = ("openai-", "anthropic-", "x-ratelimit-")
NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class UpstreamReply:
    """What the upstream answered, refusals included: status, headers worth passing on, the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class StreamedReply:
    """An answer whose body is still coming. Iterate `chunks` once, inside `async with`; leaving closes it."""

    def __init__(self, answer: aiohttp.ClientResponse, url: str, idle_s: float) -> None:
        self.status = answer.status
        self.headers = _headers(answer)
        self._answer = answer
        self._url = url
        self._idle_s = idle_s

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes, cut anywhere. Raises EngineUnavailable or EngineTimeout when it breaks off."""
        try:
            async for data in self._answer.content.iter_any():
                yield data
        except TimeoutError as error:
            raise EngineTimeout(f"{self._url} sent nothing for {self._idle_s} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self._url} broke off its stream: {error or type(error).__name__}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answer.close()


class TextUpstream:
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
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers[key_header] = f"Bearer {api_key}" if key_header == "authorization" else api_key
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=idle_s)
        self._idle_s = idle_s
        self._session: aiohttp.ClientSession | None = None

    async def chat(self, body: bytes) -> UpstreamReply:
        """POST /chat/completions, whole. A refusal is a reply too; raises EngineUnavailable and EngineTimeout."""
        return await self._whole("POST", "/chat/completions", body)

    async def ask(self, path: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> UpstreamReply:
        """POST to a path below the base url, whole, with these headers beside our own. A refusal is a reply too; raises
        EngineUnavailable and EngineTimeout."""
        return await self._whole("POST", path, body, headers)

    async def models(self) -> UpstreamReply:
        """GET /models."""
        return await self._whole("GET", "/models", None)

    async def stream_chat(self, body: bytes) -> StreamedReply:
        """POST /chat/completions of a body that asks for a stream: returns once the status is known."""
        return await self.stream("/chat/completions", body)

    async def stream(self, path: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> StreamedReply:
        """The same for a path below the base url, with these headers beside our own."""
        return StreamedReply(await self._send("POST", path, body, headers), self.base_url, self._idle_s)

    async def health(self) -> bool:
        """Whether it answers at all."""
        try:
            return (await self.models()).status < 500
        except (EngineUnavailable, EngineTimeout):
            return False

    async def close(self) -> None:
        """Let go of every connection. Idempotent."""
        if self._session is not None:
            await self._session.close()

    async def _whole(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] = NO_HEADERS
    ) -> UpstreamReply:
        answer = await self._send(method, path, body, headers)
        try:
            return UpstreamReply(answer.status, _headers(answer), await answer.read())
        except TimeoutError as error:
            raise EngineTimeout(f"{self.base_url} sent nothing for {self._idle_s} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self.base_url} broke off its answer: {error or type(error).__name__}") from error
        finally:
            answer.release()

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] = NO_HEADERS
    ) -> aiohttp.ClientResponse:
        # never sent twice: an upstream may charge for a request whose answer was lost
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                headers=self._headers,
                timeout=self._timeout,
            )
        try:
            # A redirect is an answer like any other: our key goes to no other address.
            return await self._session.request(
                method, f"{self.base_url}{path}", data=body, headers=headers, allow_redirects=False
            )
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnavailable(f"cannot connect to {self.base_url}: {error}") from error
        except TimeoutError as error:
            raise EngineTimeout(f"{self.base_url} sent nothing for {self._idle_s} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self.base_url} does not answer: {error or type(error).__name__}") from error


def _headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    named = {name.lower(): text for name, text in answer.headers.items()}
    return {name: text for name, text in named.items() if name in PASSED_ON or name.startswith(FAMILIES)}
