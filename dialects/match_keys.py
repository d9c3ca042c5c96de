"""Which messages count as the same: clients drop thoughts, write arguments anew and move whitespace when they echo.

A key holds a message's role, its text stripped, and of each tool call the id, the name and the canonical arguments
(sorted keys, 1.0 equal to 1). The text beside calls is left out of the key, since some clients lose it; `same_text`
compares it where it was kept. Thoughts, names and extra keys never count.

A chain of digests over the keys names every prefix of a conversation, tools included.

Invariant: every value has a key, whatever numbers and however many levels it holds: nothing here raises for what a
client or a model wrote. A value that cannot be written in the canonical form is named by its own text."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import orjson

from millrace.dialects import shape
from millrace.dialects.rendering.base import Message, Tools
from millrace.schemas.json_values import Json

SIZE = 16
LONG_BYTES = 256 << 10
"""bytes of a request that is not read a second time only to know its retry"""
EXACT = 2**53
"""below it every whole float is one integer"""


def canonical(value: object) -> bytes:
    """JSON with sorted keys and whole floats as integers; Python's own text of what nests too deep for that."""
    try:
        value = _integer(value)
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (TypeError, RecursionError):
        return repr(value).encode(errors="surrogatepass")


def canonical_json(data: bytes | str) -> bytes:
    """`canonical` of JSON text; text that is no JSON, or more of it than is looked into, stays as it is, stripped."""
    try:
        if shape.unwieldy(data):
            raise TypeError
        return orjson.dumps(_integer(orjson.loads(data)), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, TypeError, RecursionError):
        return data.strip() if isinstance(data, bytes) else data.strip().encode(errors="surrogatepass")


def message_key(message: Message) -> bytes:
    """What identifies a message."""
    calls = message.get("tool_calls")
    if calls:
        parts: list[Json] = [[call["id"], call["function"]["name"], _arguments(call)] for call in calls]
        return _list_json([message["role"], parts])
    return _list_json([message["role"], message.get("tool_call_id"), message["content"].strip()])


def same_text(text: str, echo: str) -> bool:
    """Whether an echo beside tool calls may stand for the stored text: equal, or lost by the client."""
    echo = echo.strip()
    return not echo or echo == text.strip()


def start(tools: Tools) -> bytes:
    """The digest before the first message."""
    return blake2b(canonical(tools) if tools else b"", digest_size=SIZE).digest()


def extend(digest: bytes, message: Message) -> bytes:
    """The digest after one more message."""
    return blake2b(digest + message_key(message), digest_size=SIZE).digest()


def chain(messages: Sequence[Message], tools: Tools, behind: str | None = None) -> list[bytes]:
    """The digest of every prefix: entry i is that of the first i messages. `behind`: what names the messages before the
    first, where nobody here knows them: no other conversation begins so."""
    out = [start(tools)]
    if behind is not None:
        out[0] = blake2b(out[0] + b"behind" + behind.encode(errors="surrogatepass"), digest_size=SIZE).digest()
    for message in messages:
        out.append(extend(out[-1], message))
    return out


def request_hash(body: bytes) -> bytes:
    """What a retry of a request has in common with it: its values, of a long one its bytes."""
    return blake2b(body if len(body) > LONG_BYTES else canonical_json(body), digest_size=SIZE).digest()


def _arguments(call: Message) -> str:
    return canonical_json(call["function"]["arguments"]).decode(errors="replace")


def _list_json(parts: list[Json]) -> bytes:
    try:
        return orjson.dumps(parts)
    except TypeError:  # half a surrogate pair, which no JSON text of UTF-8 holds
        return repr(parts).encode()


def _integer(value: object) -> object:
    if isinstance(value, float):
        return int(value) if -EXACT < value < EXACT and value.is_integer() else value
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return _round(value)
    if isinstance(value, dict):
        return {name: _integer(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_integer(inner) for inner in value]
    return value


def _round(value: int) -> float | str:
    """An integer that 64 bits do not hold, as a reader of JSON text gets it; in digits where even a float ends."""
    try:
        return float(value)
    except OverflowError:
        return hex(value)
