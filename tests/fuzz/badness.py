"""What no listener should be sent, as bytes on a connection, and what must come back.

Invariants: a case names every status that it may be answered with, and `DROPPED` where nothing that came was a whole
request; everything drawn comes from the `Random` that is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

DROPPED = 0
"""the status of a connection that ended without an answer"""
HUGE = 50 << 20
PART = 1 << 20
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Target:
    """One route of a listener, and a request that it would take. `foreign`: a body that names what is another
    tenant's. `serves`: whether it does more than to refuse every whole request alike."""

    listener: str
    method: str
    path: str
    sound: Any = None
    key: str = "sk-one"
    foreign: Any = None
    serves: bool = True

    @property
    def name(self) -> str:
        return f"{self.listener} {self.method} {self.path}"

    @property
    def body(self) -> bytes:
        return b"" if self.sound is None else json.dumps(self.sound).encode()

    def head(self, length: int | None = None, *more: str, key: str | None = None, path: str | None = None) -> bytes:
        """The head of a request; `more` are lines of it. length: None for none."""
        key = self.key if key is None else key
        lines = [f"{self.method} {path or self.path} HTTP/1.1", "host: 127.0.0.1", "connection: close"]
        lines += [f"authorization: Bearer {key}"] if key else []
        lines += [f"content-length: {length}"] if length is not None else []
        if not any(line.startswith("content-type") for line in more):
            lines.append("content-type: application/json")
        return "\r\n".join([*lines, *more, "", ""]).encode("latin-1")

    def whole(self, body: bytes | None = None, *more: str, key: str | None = None, path: str | None = None) -> bytes:
        body = self.body if body is None else body
        return self.head(len(body), *more, key=key, path=path) + body


PROXIES = ("mcp", "a2a")
"""listeners that pass everything on to a server"""


@dataclass(frozen=True)
class Case:
    """`parts` are sent one after another, `pause_s` between two; then the client ends its side if `half`."""

    parts: Iterator[bytes] | Sequence[bytes]
    statuses: frozenset[int]
    pause_s: float = 0.0
    half: bool = False
    reads: bool = True
    """whether the client waits for an answer"""
    ours: bool = True
    """whether an answer is of the application, and so has its shape, and not of the server of HTTP below it"""


@dataclass
class Answered:
    """What came back, raw."""

    status: int = DROPPED
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


def of(*statuses: int) -> frozenset[int]:
    return frozenset(statuses)


def _zeros(before: bytes, chunked: bool) -> Iterator[bytes]:
    yield before
    for _ in range(HUGE // PART):
        yield f"{PART:x}\r\n".encode() + b"0" * PART + b"\r\n" if chunked else b"0" * PART
    if chunked:
        yield b"0\r\n\r\n"


def _bodies(target: Target, r: Random) -> Iterator[tuple[str, Case]]:
    """For a route that takes a body."""
    body, passes = target.body, target.listener in ("door", *PROXIES)
    bad = of(200, 400) if passes else of(400) if target.serves else of(404)
    names = json.dumps(target.sound).encode()[:-1] + (b", " if target.sound else b"")
    deep = r.randrange(50_000, 200_000)
    for name, sent in {
        "no JSON": r.randbytes(r.randrange(1, 3000)).replace(b"{", b"x"),
        "cut JSON": (body + b" ")[: r.randrange(1, max(2, len(body)))],
        "deep array": b"[" * deep,
        "deep object": b'{"a":' * deep,
        "deep inside": names + b'"x": ' + b"[" * deep + b"]" * deep + b"}",
        "invalid UTF-8": names + b'"x": "' + r.choice((b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88")) + b'"}',
        "NaN": names + b'"x": ' + r.choice((b"NaN", b"Infinity", b"-Infinity")) + b"}",
        "two values": body + body + b"!",
    }.items():
        yield name, Case([target.whole(sent)], bad)
    # Refused by its length: what the client still sends may then end the connection before it reads the answer.
    large = of(200) if target.listener in PROXIES else of(413, DROPPED)
    yield "too large", Case(_zeros(target.head(HUGE), False), large)
    chunked = target.head(None, "transfer-encoding: chunked")
    # Of a client that is slow, or on a machine that is, the time may be over before the bytes are too many.
    yield "too large, in chunks", Case(_zeros(chunked, True), large if target.listener in PROXIES else large | of(408))
    length = len(body) + 1000
    yield "half a body", Case([target.head(length) + body], of(400, DROPPED), half=True)
    slow = [target.head(length), *[b" "] * 120]
    late = {"otlp": of(400), "mcp": of(DROPPED), "a2a": of(400, DROPPED)}.get(target.listener, of(408))
    yield "a slow body", Case(slow, late, pause_s=0.05, half=target.listener in ("otlp", *PROXIES))
    wrong = target.head(None, "transfer-encoding: chunked") + b"zz\r\n" + body
    yield "a chunk of no length", Case([wrong], of(400, DROPPED), ours=False)
    if target.foreign is not None:
        sent = json.dumps(target.foreign).encode()
        yield "another tenant's id", Case([target.whole(sent, key="sk-two")], of(400, 404))


def _heads(target: Target, r: Random, open_to_all: bool) -> Iterator[tuple[str, Case]]:
    """For every route. open_to_all: it answers strangers too."""
    line = f"{target.method} {target.path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    refused = of(400, 413, 431, DROPPED)
    served = of(200, 400, 401, 404, 405)
    if target.listener not in PROXIES:
        for name, key in (("no key", ""), ("a wrong key", "sk-wrong"), ("a session's key that is none", "mr-x.y")):
            yield name, Case([target.whole(key=key)], of(200) if open_to_all else of(401))
    else:
        yield "a wrong key", Case([target.whole(None, "x-millrace-key: sk-wrong")], of(401))
    yield "half a head", Case([line[: r.randrange(1, len(line))].encode()], of(400, DROPPED), half=True, ours=False)
    yield "no HTTP", Case([r.randbytes(r.randrange(1, 3000)) + b"\r\n\r\n"], of(400, DROPPED), half=True, ours=False)
    for name, bytes_ in (("a null", "\0"), ("a bare end of line", "\rset-cookie: evil=1"), ("a bare LF", "x\ny z: 1")):
        sent = target.whole(None, f"x-millrace-session: a{bytes_}b")
        yield f"{name} in a header", Case([sent], refused | served, ours=False)
    path = target.path + "%0d%0aset-cookie:%20evil=1"
    yield "a header in the path", Case([target.whole(path=path)], served)
    yield "a flood of headers", Case([target.whole(None, *[f"x-{i}: {'y' * 1000}" for i in range(1000)])], refused,
                                     ours=False)  # fmt: skip
    twice = target.head(3, "content-length: 7") + b"{}     "
    yield "two lengths", Case([twice], refused, half=True, ours=False)
    below = target.head(-1) + b"{}"
    yield "a length below zero", Case([below], refused, half=True, ours=False)
    both = target.head(5, "transfer-encoding: chunked") + b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
    yield "a request within another", Case([both], refused | served, half=True, ours=False)
    yield "a client that reads nothing", Case([target.whole()], of(DROPPED), reads=False)


def _packed(target: Target, bomb: bytes) -> Iterator[tuple[str, Case]]:
    gzipped = "content-encoding: gzip"
    yield "a bomb", Case([target.whole(bomb, gzipped)], of(413))
    yield "no gzip", Case([target.whole(b"\x1f\x8b\xff", gzipped)], of(400))
    yield "half a gzip", Case([target.whole(bomb[: len(bomb) // 2], gzipped)], of(400, 413))
    protobuf = "content-type: application/x-protobuf"
    yield "deep protobuf", Case([target.whole(b"\x0a\xff\xff\xff\x7f" * 1000, protobuf)], of(400))
    yield "no protobuf", Case([target.whole(b"\xff" * 100, protobuf)], of(400))
    yield "another form", Case([target.whole(None, "content-type: text/html")], of(415))


def cases(target: Target, r: Random, bomb: bytes) -> dict[str, Case]:
    """Every bad thing for one route, by name."""
    open_to_all = target.path == "/health"
    found = dict(_heads(target, r, open_to_all))
    if target.sound is not None:
        found |= dict(_bodies(target, r))
    if target.listener == "otlp" and target.sound is not None:
        found |= dict(_packed(target, bomb))
    return found


async def send(url: str, case: Case) -> Answered:
    """Play a case, and read what comes while it is sent."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        reading = asyncio.create_task(_read(reader)) if case.reads else None
        with suppress(OSError):
            for part in case.parts:
                if reading is not None and reading.done():
                    break
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(case.pause_s)
            if case.half:
                writer.write_eof()
        if reading is None:
            await asyncio.sleep(0.05)
            return Answered()
        async with asyncio.timeout(PATIENCE_S):
            return await reading
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> Answered:
    """The first answer of a connection."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return Answered()
    first, *lines = head.strip().split("\r\n")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    length, body = dict(headers).get("content-length"), b""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        body = await reader.readexactly(int(length)) if length is not None else await reader.read()
    return Answered(int(first.split()[1]), headers, body)


Frames = Callable[[Random], list[bytes]]


def frame(data: bytes, opcode: int = 1, *, length: int | None = None, masked: bool = True, end: bool = True) -> bytes:
    """A frame of a WebSocket; length: what it says of itself, whatever it holds."""
    length = len(data) if length is None else length
    first = bytes([(0x80 if end else 0) | opcode])
    bit = 0x80 if masked else 0
    if length < 126:
        first += bytes([bit | length])
    elif length < 1 << 16:
        first += bytes([bit | 126]) + length.to_bytes(2, "big")
    else:
        first += bytes([bit | 127]) + length.to_bytes(8, "big")
    return first + (b"\0\0\0\0" if masked else b"") + data


SOCKET: dict[str, Frames] = {
    "bytes that are no frame": lambda r: [r.randbytes(2000)],
    "a frame that is not masked": lambda r: [frame(b"{}", masked=False)],
    "text of invalid UTF-8": lambda r: [frame(b"\xff\xfe")],
    "an unknown kind": lambda r: [frame(b"x", 3 + r.randrange(5))],
    "a long ping": lambda r: [frame(b"x" * 200, 9)],
    "a frame of 2^62 bytes": lambda r: [frame(b"x" * 1000, length=1 << 62)],
    "50 MB in one frame": lambda r: [frame(b"", length=HUGE), *[b"0" * PART] * (HUGE // PART)],
    "50 MB in fragments": lambda r: [
        frame(b"0" * PART, 0 if at else 1, end=False) for at in range(HUGE // PART)
    ],
    "a fragment of nothing": lambda r: [frame(b"x", 0)],
    "a close of one byte": lambda r: [frame(b"\1", 8)],
    "no JSON": lambda r: [frame(b"{")],
    "deep JSON": lambda r: [frame(b"[" * 100_000)],
    "NaN": lambda r: [frame(b'{"type":"response.create","model":"m","input":"hi","temperature":NaN}')],
    "another kind of event": lambda r: [frame(b'{"type":"response.steer"}')],
    "no UTF-8 in a field that nobody reads": lambda r: [
        frame(b'{"type":"response.create","model":"m","input":"hi","x":"\xff"}', 2)
    ],
    "an id of nobody": lambda r: [
        frame(b'{"type":"response.create","model":"m","input":"hi","previous_response_id":"resp_x"}')
    ],
    "half a frame": lambda r: [frame(b"x" * 10, length=1000)],
}  # fmt: skip


async def upgraded(url: str, path: str, key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    """A WebSocket asked for by hand, and the status of the answer."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    lines = [
        *(f"GET {path} HTTP/1.1", "host: 127.0.0.1", f"authorization: Bearer {key}", "connection: upgrade"),
        *("upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA=="),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return reader, writer, DROPPED
    return reader, writer, int(head.split()[1])


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """What a server sends, by kind, until the connection ends."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            first, second = await reader.readexactly(2)
            length = second & 0x7F
            if length > 125:
                length = int.from_bytes(await reader.readexactly(2 if length == 126 else 8), "big")
            yield first & 0x0F, await reader.readexactly(length)
