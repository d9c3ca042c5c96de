"""The processes behind `millrace mcp` and `millrace a2a`: standard input and output, or a port.

Invariant: a session that is missing, and before a command a spool that cannot be made, is said and costs the capture
alone: the server is served all the same."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from millrace.infra.errors import ConfigError, GatewayError
from millrace.infra.terminal import CleanFormatter, clean
from millrace.producers.intake.capture import Capture
from millrace.producers.intake.conversation import Owner
from millrace.producers.intake.jsonrpc import Lines
from millrace.producers.intake.mcp import Conversation
from millrace.producers.intake.spool import Spool, home
from millrace.producers.intake.tee import FLUSH_S, NotStarted, Tee, leave
from millrace.producers.session_keys import session_id
from millrace.schemas import bounds
from millrace.schemas.ids import new_id

if TYPE_CHECKING:  # it loads aiohttp, which a server on standard input and output does without
    from millrace.producers.intake.reverse import ReverseProxy

KEY, URL = "MILLRACE_SESSION_KEY", "MILLRACE_GATEWAY_URL"
NO_SESSION = f"no session is named ({KEY} or --session): serving goes on, and nothing is captured"


def tell(text: str) -> None:
    """A line on standard error, which the server's own lines share."""
    try:
        os.write(2, f"millrace: {clean(text)}\n".encode())
    except OSError:
        return  # nobody reads it


def owner_of(key: str, base_url: str) -> Owner | None:
    """Whose the conversation is; None where no session is named. Raises ConfigError for what is no session's key or no
    address."""
    _check_address(base_url, f"{base_url!r} is no address of a gateway: write http://HOST:PORT/v1")
    if not key:
        return None
    try:
        session_id(key)
    except GatewayError as error:
        raise ConfigError(str(error)) from None
    return Owner(key, base_url.rstrip("/"))


def _check_address(url: str, message: str) -> None:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(message)


def _name(server: str) -> str:
    """What records call a server: within the bounds of a name, whatever bytes a file system gave it."""
    return server.encode(errors="replace").decode()[: bounds.NAME_BYTES // 4]


def open_capture(folder: Path | None) -> Capture | None:
    """A capture with a spool of its own; None, and said, where none can be made."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(CleanFormatter("millrace: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        return Capture(Spool(folder or home()), tell)
    except (OSError, GatewayError) as error:
        tell(f"nothing is captured, since there is no spool: {error}")
        return None


def stdio(command: Sequence[str], owner: Owner | None, server: str, folder: Path | None) -> None:
    """Run a server in the place of this process. Never returns."""
    environment = {name: value for name, value in os.environ.items() if name != KEY}
    try:
        tee = Tee(command, environment)
    except NotStarted as error:
        tell(str(error))
        os._exit(error.status)
    if owner is None:
        tell(NO_SESSION)
    capture = open_capture(folder) if owner is not None else None
    if capture is None or owner is None:
        leave(tee.run(None, None))
        return
    conversation = Conversation(_name(server or Path(command[0]).name), lambda: f"mcp-{new_id()}")
    status = tee.run(
        capture.side(owner, conversation, Lines(), client=True),
        capture.side(owner, conversation, Lines(), client=False),
    )
    capture.close(FLUSH_S)
    leave(status)


def http(
    url: str, host: str, port: int, owner: Owner | None, base_url: str, server: str, folder: Path | None,
    announce: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve an MCP server's other address until SIGTERM. Raises ConfigError for an address that is none."""
    from millrace.producers.intake.mcp_proxy import McpProxy

    _check_address(url, f"{url!r} is no address of a server: write http://HOST:PORT/mcp")
    capture = _require_capture(folder)
    _serve(McpProxy(url, _name(server or urlsplit(url).netloc), capture, base_url, owner, tell, host), port, announce)


def agent(
    url: str, host: str, port: int, owner: Owner | None, base_url: str, name: str, folder: Path | None, key: str,
    hands_on: bool, announce: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve another agent's other address until SIGTERM. `key`: a gateway's that may start sessions, or none. Raises
    ConfigError for an address that is none, and for a key to hand on where no session begins."""
    from millrace.producers.intake.a2a_proxy import A2aProxy, Children

    _check_address(url, f"{url!r} is no address of an agent: write http://HOST:PORT")
    if hands_on and not key:
        raise ConfigError("--hand-on-key needs --key: only a delegation with a session of its own has a key")
    children = Children(key, hands_on) if key else None
    capture = _require_capture(folder)
    proxy = A2aProxy(url, _name(name or urlsplit(url).netloc), capture, base_url, owner, tell, host, children)
    _serve(proxy, port, announce)


def _require_capture(folder: Path | None) -> Capture:
    """Raises ConfigError."""
    capture = open_capture(folder)
    if capture is None:
        raise ConfigError("choose a folder for the spool with --spool")
    return capture


def _serve(proxy: ReverseProxy, port: int, announce: Callable[[str], None]) -> None:
    from millrace.producers.intake.reverse import FLUSH_S as PATIENCE_S
    from millrace.producers.intake.reverse import serve

    try:
        asyncio.run(serve(proxy, proxy.host, port, announce))
    finally:
        proxy.capture.close(PATIENCE_S)
