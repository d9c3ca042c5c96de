"""An agent's card with the addresses of a proxy in the place of the agent's own. Pure.

Invariants: nothing but addresses changes, and signatures go, since they no longer fit; an address on another server
than the one that the proxy stands before is left out, so that no delegation goes past the capture."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import orjson

from millrace.infra.config import is_local
from millrace.infra.errors import ConfigError

PATHS = ("/.well-known/agent-card.json", "/.well-known/agent.json", "/extendedAgentCard", "/v1/card")
"""where agents show their card over HTTP, in any of the versions"""


def rewritten(card: bytes, origin: str, ours: str) -> bytes:
    """A card of the server at `origin`, as the proxy at `ours` (both `http://HOST:PORT`, ours with the session's key
    behind it where a path names it) shows it. Raises ConfigError for one that names no address there, ValueError for
    what is no card."""
    found = orjson.loads(card)
    if not isinstance(found, dict):
        raise ValueError("a card is a JSON object")
    named: list[str] = []
    kept = False
    for list_name in ("supportedInterfaces", "additionalInterfaces"):
        if isinstance(found.get(list_name), list):
            moved = [_moved(one, origin, ours, named) for one in found[list_name]]
            found[list_name] = [one for one in moved if one is not None]
            kept = kept or bool(found[list_name])
    if isinstance(found.get("url"), str):
        own = _moved(found, origin, ours, named)
        if own is None:
            del found["url"]
        kept = kept or own is not None
    if not kept:
        raise ConfigError(
            f"the agent's card names {', '.join(named) or 'no address'}, none of them on {origin}: "
            "start the proxy with --url at an address that the card names"
        )
    found.pop("signatures", None)
    return orjson.dumps(found)


def _moved(one: Any, origin: str, ours: str, named: list[str]) -> Any:
    """What has a `url`, with ours; None for one on another server."""
    if not isinstance(one, dict) or not isinstance(one.get("url"), str):
        return None
    named.append(one["url"])
    parts = urlsplit(one["url"])
    if _server(f"{parts.scheme}://{parts.netloc}") != _server(origin):
        return None
    one["url"] = ours.rstrip("/") + urlunsplit(("", "", parts.path, parts.query, parts.fragment))
    return one


def _server(origin: str) -> tuple[str, str, int | None]:
    """What tells two servers apart: this machine has many names."""
    parts = urlsplit(origin)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        port = None
    host = parts.hostname or ""
    return parts.scheme, "localhost" if host == "0.0.0.0" or is_local(host) else host, port
