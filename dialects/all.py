"""Every dialect that the gateway speaks."""

from __future__ import annotations

import re
from collections.abc import Mapping

import orjson

from millrace.dialects.base import Dialect
from millrace.dialects.chat.dialect import Chat
from millrace.dialects.completions.dialect import Completions
from millrace.dialects.errors import ApiError
from millrace.dialects.messages.dialect import Messages
from millrace.dialects.reading.reader import DialectReader, RecordedCall
from millrace.dialects.rendering.base import RAW
from millrace.dialects.responses.dialect import Responses
from millrace.schemas.json_values import Json, JsonObject

UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
CHAT, COMPLETIONS, MESSAGES, RESPONSES = Chat(), Completions(), Messages(), Responses()
DIALECTS: tuple[Dialect, ...] = (MESSAGES, RESPONSES, COMPLETIONS, CHAT)
"""the last resort of `read` last; what else depends on which there are, follows from this when it is asked"""


def of_path(path: str) -> Dialect:
    """Who speaks on a route, and answers what goes wrong on it; chat completions where nobody else does."""
    return next((dialect for dialect in DIALECTS if path.startswith(dialect.path)), CHAT)


def by_name(name: str) -> Dialect:
    """The dialect of that name in settings."""
    return next(dialect for dialect in DIALECTS if dialect.name == name)


def reader(dialect: Dialect) -> DialectReader:
    """How calls of a dialect to an upstream are read for the log."""
    return dialect.reader(dialect, writer_of)


def is_minted(id: str) -> bool:
    """Whether a gateway made this id of a response, and so has its call in the log."""
    return any(id.startswith(one.prefix) and UUID7.fullmatch(id, len(one.prefix)) for one in DIALECTS)


def read(request: bytes, response: bytes) -> RecordedCall:
    """What a recorded call said, in the dialect that wrote its response. Raises ApiError or ValueError for bytes that
    are no record of a call."""
    answer = _object(response)
    return writer_of(answer).read(request, answer)


def as_chat(request: bytes, response: bytes) -> tuple[bytes, bytes]:
    """The request and the response of a recorded call as chat completions have them, whatever API it came by. What is
    one already, or no record of a call, stays as it is."""
    try:
        answer = _object(response)
        writer = writer_of(answer)
        if writer is CHAT:
            return request, response
        call = writer.read(request, answer)
    except (ApiError, ValueError):
        return request, response
    choices = [{"index": choice, "message": message} for choice, message in call.replies.items()]
    messages = [{name: value for name, value in one.items() if name != RAW} for one in call.messages]
    chat_request = {"messages": messages, **({"tools": call.tools} if call.tools else {})}
    return orjson.dumps(chat_request), orjson.dumps({"choices": choices})


def writer_of(response: Mapping[str, Json]) -> Dialect:
    """Who wrote a response: chat completions where nobody else did."""
    return next(dialect for dialect in DIALECTS if dialect.wrote(response))


def _object(response: bytes) -> JsonObject:
    try:
        answer = orjson.loads(response)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the answer is no JSON: {error}") from None
    if not isinstance(answer, dict):
        raise ValueError("the answer is no JSON object")
    return answer
