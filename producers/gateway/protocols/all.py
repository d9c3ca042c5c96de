"""Every dialect that the gateway speaks."""

from __future__ import annotations

import orjson

from millrace.producers.gateway.protocols.base import Dialect, Recorded
from millrace.producers.gateway.protocols.chat import Chat
from millrace.producers.gateway.protocols.messages import Messages

CHAT, MESSAGES = Chat(), Messages()
DIALECTS: tuple[Dialect, ...] = (MESSAGES, CHAT)
"""the last resort of `read` last"""


def of_path(path: str) -> Dialect:
    """Who speaks on a route, and answers what goes wrong on it; chat completions where nobody else does."""
    return next((dialect for dialect in DIALECTS if path.startswith(dialect.path)), CHAT)


def read(request: bytes, response: bytes) -> Recorded:
    """What a recorded call said, in the dialect that wrote its response. Raises ApiError or ValueError for bytes that
    are no record of a call."""
    try:
        found = orjson.loads(response)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the answer is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return next(dialect for dialect in DIALECTS if dialect.wrote(found)).read(request, found)
