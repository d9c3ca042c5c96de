"""A real MCP server for tests, of the `mcp` package: `python -m tests.support.mcp_server`, over standard input and
output, or with a port over streamable HTTP."""

from __future__ import annotations

import os
import sys
from typing import Any

from mcp.server import MCPServer

server = MCPServer("calc", version="1.2.3")


@server.tool()
def add(a: float, b: float) -> float:
    """The sum."""
    return a + b


@server.tool()
def fail(why: str) -> str:
    """Always an error."""
    raise ValueError(why)


@server.tool()
def repeat(text: str, times: int) -> str:
    """A long answer."""
    return text * times


@server.tool()
def stop(status: int) -> str:
    """The end of the server, in the middle of a call."""
    os._exit(status)


@server.tool()
def environment(name: str) -> str:
    """What the server was given."""
    return os.environ.get(name, "nothing")


def main(*words: str) -> None:
    if not words:
        server.run("stdio")
        return
    options: dict[str, Any] = {"json_response": "json" in words, "stateless_http": "stateless" in words}
    server.run("streamable-http", host="127.0.0.1", port=int(words[0]), **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
