"""An HTTP server of raw bytes: each request is answered by the next script, so that any misbehaviour can be played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class FakeServer:
    """`scripts` are used up in order, the last one stays; `requests` holds (head, body) of what came."""

    scripts: list[Script]
    url: str = ""
    requests: list[tuple[str, bytes]] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = [line.lower() for line in head.split("\r\n")]
                length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
                self.requests.append((head, await reader.readexactly(length)))
                script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
                await script(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


def answer(body: bytes, status: int = 200, kind: str = "application/json") -> Script:
    """A whole answer."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )

    return script


def stream(*parts: bytes, then: str = "end", status: int = 200) -> Script:
    """A chunked answer; `then` is end, cut (the connection breaks) or hang."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        )
        for part in parts:
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        if then == "end":
            writer.write(b"0\r\n\r\n")
        elif then == "cut":
            writer.close()
        else:
            await asyncio.sleep(3600)

    return script


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close without a byte."""
    writer.close()


async def stay_silent(writer: asyncio.StreamWriter) -> None:
    """Say nothing for ever."""
    await asyncio.sleep(3600)


@asynccontextmanager
async def serving(*scripts: Script, port: int = 0) -> AsyncIterator[FakeServer]:
    """A server on this port of this machine, by default a free one."""
    fake = FakeServer(list(scripts))
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(fake.handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
