"""The strings inside an event's body, as one buffer to scan, and the body again with spans of them replaced.

Invariants: leaves come in the same order whenever the same body is walked; JSON inside a field is parsed, so that a
scanner sees values and not their escapes; a leaf's path names fields and positions, never content."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

SEPARATOR = b"\n\x00\n"
"""between leaves in the buffer; no value of ours spans it"""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "episode_started": ("task",),
    "episode_ended": ("output", "reason", "task", "stop_condition"),
    "model_call": ("request", "response", "stop_condition"),
    "tool_call": ("arguments",),
    "tool_result": ("content",),
    "observation": ("content", "origin"),
    "internal_state": ("summary", "plan_step", "injected"),
    "reward": ("critique", "label", "failure"),
    "user_feedback": ("text", "label"),
    "security_label": (),
    "gap": ("reason",),
}
"""event kind -> fields of its body that hold text; those that hold JSON are parsed"""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z_-]{0,40}")
Visit = Callable[[str, str], str]


class Leaf(NamedTuple):
    """One string, UTF-8, at bytes [start, start + len(text)) of the buffer."""

    path: str
    start: int
    text: bytes


def collect(kind: str, body: Mapping[str, Any]) -> tuple[bytes, list[Leaf]]:
    """(buffer to scan, its leaves)."""
    leaves: list[Leaf] = []
    at = 0

    def visit(path: str, text: str) -> str:
        nonlocal at
        data = text.encode("utf-8", "surrogatepass")
        leaves.append(Leaf(path, at, data))
        at += len(data) + len(SEPARATOR)
        return text

    for _ in _walk_fields(kind, body, visit):
        pass
    return SEPARATOR.join(leaf.text for leaf in leaves), leaves


def replaced(kind: str, body: Mapping[str, Any], texts: Mapping[int, str]) -> dict[str, Any]:
    """A copy of the body in which leaf n reads `texts[n]`."""
    n = -1

    def visit(path: str, text: str) -> str:
        nonlocal n
        n += 1
        return texts.get(n, text)

    return {
        **body,
        **{
            field: _restored(body[field], value, document) for field, value, document in _walk_fields(kind, body, visit)
        },
    }


def spans_of(leaf: Leaf, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of buffer spans that lie in a leaf, as offsets of the leaf."""
    end = leaf.start + len(leaf.text)
    return [
        (max(lo, leaf.start) - leaf.start, min(hi, end) - leaf.start)
        for lo, hi in spans
        if lo < end and hi > leaf.start
    ]


def _walk_fields(kind: str, body: Mapping[str, Any], visit: Visit) -> Iterator[tuple[str, Any, bool]]:
    """(field, its value after the visit, whether that is a document)."""
    for field in FIELDS[kind]:
        value = body[field]
        if value is None:
            continue
        document = _parsed(value) if isinstance(value, str | bytes) else value
        if document is not None:
            yield field, _walk(document, field, visit), True
        else:
            yield field, visit(field, value.decode("utf-8", "replace") if isinstance(value, bytes) else value), False


def _restored(before: Any, value: Any, document: bool) -> Any:
    if not isinstance(before, str | bytes):
        return value
    data = orjson.dumps(value) if document else value.encode("utf-8", "replace")
    return data if isinstance(before, bytes) else data.decode()


def _parsed(value: str | bytes) -> Any | None:
    """The document behind a field that begins like one."""
    if value[:1] not in ("{", "[", b"{", b"["):
        return None
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return None


def _walk(node: Any, path: str, visit: Visit) -> Any:
    match node:
        case str():
            return visit(path, node)
        case dict():
            out = {}
            for n, (key, value) in enumerate(node.items()):
                plain = _PLAIN_KEY.fullmatch(key) is not None
                name = key if plain else visit(f"{path}/#{n}", key)
                out[name] = _walk(value, f"{path}/{key if plain else n}", visit)
            return out
        case list():
            return [_walk(value, f"{path}/{n}", visit) for n, value in enumerate(node)]
        case int() | float() if not isinstance(node, bool) and abs(node) >= 10**11:
            # A card number or account may come as a bare number: it is text to a detector.
            text = repr(node)
            seen = visit(path, text)
            return node if seen == text else seen
        case _:
            return node
