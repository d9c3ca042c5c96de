"""From one process of a gateway to another: a request goes over a Unix socket, its answer comes back byte for byte.

The sockets lie in a folder that only this user can open, so what comes through one is a process's of this gateway. Its
one header says whether the request is only for who holds its conversation; a client's own header of that name goes no
further than the public port.

Invariants: a request that was handed on is answered where it came to, and never handed on again; the answer's bytes are
those of the process that answers; a client that leaves ends the request there too."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from yarl import URL

from millrace.dialects.errors import RETRY_AFTER_S, ApiError
from millrace.infra.process.net import socket_dir
from millrace.schemas import bounds

HOP = b"x-millrace-hop"
"""the header of a request that another process handed on"""
HOLDER_CALL, ANY_CALL, SPENDING, KNOWN_IDS = b"held", b"any", b"spending", b"known"
"""what it says: a request for who holds its conversation, one for whoever gets it, and two questions of the other
process itself: what keys have spent, and which of the ids in the body anybody was told there"""
CONNECT_S = 5.0
OF_A_CONNECTION = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
}  # fmt: skip
"""headers that belong to one connection, and go no further"""
DROPPED_HEADERS = OF_A_CONNECTION | {HOP, b"content-length", b"expect"}
MADE_ANEW = {b"date", b"server"}
"""headers that each server puts to an answer itself"""
Headers = list[tuple[bytes, bytes]]


class NobodyThere(Exception):
    """No process listens at a socket. What was sent there was read by nobody."""


class BrokenOff(Exception):
    """A process went away while it answered."""


class Hops:
    """The ways to the other processes of the gateway whose first capture log is in `folder`. Used in one event loop;
    close it at the end."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._home = home
        # Several gateways may have one home, each with a capture log of its own.
        self._name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
        self._clients: dict[int, aiohttp.ClientSession] = {}
        self._closed = False

    def socket_of(self, index: int) -> Path:
        """Where the process of an index listens for the others."""
        return socket_dir(self._home) / f"gateway-{self._name}-{index}"

    @asynccontextmanager
    async def ask(
        self,
        index: int,
        why: bytes,
        method: str = "GET",
        target: str = "/",
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes = b"",
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """The answer of a process to a request, its body still to be read. Raises NobodyThere and BrokenOff."""
        sent_headers = [
            (name, value) for name, value in headers if name.lower() not in DROPPED_HEADERS and name[:1] != b":"
        ]
        sent_headers.append((HOP, why))
        if self._closed:
            raise BrokenOff
        url = URL(f"http://localhost{target}", encoded=True)
        try:
            async with self._client(index).request(
                method, url, headers=[(name.decode(), _text(value)) for name, value in sent_headers], data=body or None
            ) as answer:
                yield answer
        except aiohttp.ClientConnectorError as error:
            raise NobodyThere from error
        except aiohttp.ClientError as error:
            raise BrokenOff from error

    def _client(self, index: int) -> aiohttp.ClientSession:
        if index not in self._clients:
            self._clients[index] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self.socket_of(index)), limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
                max_line_size=bounds.HEADER_BYTES,
                max_field_size=bounds.HEADER_BYTES,
            )
        return self._clients[index]

    async def close(self) -> None:
        """Break off what is still under way, and begin nothing more. Idempotent."""
        self._closed = True
        for client in self._clients.values():
            await client.close()
        self._clients.clear()


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers of an answer that its client gets."""
    left_out = OF_A_CONNECTION | MADE_ANEW
    return [(name.lower(), value) for name, value in headers if name.lower() not in left_out]


def process_down() -> ApiError:
    """The process that holds a conversation does not answer."""
    message = "The gateway's process that holds this conversation starts again: try again"
    return ApiError(503, message, type="server_error", code="process_down", retry_after_s=RETRY_AFTER_S)


def cut_off() -> ApiError:
    """It went away while it answered."""
    message = "This call was cut off: the gateway's process that holds its conversation went away"
    return ApiError(503, message, type="server_error", code="cut_off", retry_after_s=RETRY_AFTER_S)


def _text(value: bytes) -> str:
    """A header's value as it is sent, which is UTF-8: what was none means the same as the text that it is read as."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
