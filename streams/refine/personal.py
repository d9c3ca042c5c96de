"""Fields that a tool's schema marks as personal (`"x-personal": true`), and their values in calls of tools.

Invariants: a mark holds for the field's name in every call of the event and, in a trajectory, in those that follow;
hits are labels, as the kinds of other personal data are; schemas themselves are left alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import orjson

from millrace.streams.refine.detectors.base import Hit
from millrace.streams.refine.documents import KEY, TooDeep, document
from millrace.streams.refine.leaves import Buffer, Leaf, LeafKind

KIND = "personal"
_MARK = b'"x-personal"'
MOST_FIELDS = 256
"""names that a trajectory keeps"""


def fields_of(buffer: Buffer) -> frozenset[str]:
    """The fields that schemas of the buffer mark."""
    names: set[str] = set()
    for source in buffer.documents.values():
        if _MARK in source.data:
            names.update(_marks(orjson.loads(source.data)))
    return frozenset(sorted(names)[:MOST_FIELDS])


def hits(buffer: Buffer, fields: Collection[str]) -> list[Hit]:
    """The values of such fields in the buffer."""
    if not fields:
        return []
    names = frozenset(name.encode() for name in fields)
    out: list[Hit] = []
    key: Leaf | None = None
    inside = {source: _values(buffer, source, names) for source in buffer.documents}
    for leaf in buffer.leaves:
        text = buffer.text_of(leaf)
        if leaf.kind is LeafKind.KEY:
            key = leaf if text in names else None
        elif leaf.kind in (LeafKind.STRING, LeafKind.NUMBER):
            is_beside = key is not None and leaf.start - key.end <= 3
            if is_beside or any(lo <= leaf.lo < hi for lo, hi in inside.get(leaf.source, ())):
                out.append(_hit(leaf.start, leaf.end))
            elif text[:1] == b"{" and any(name in text for name in names):
                out += (_hit(leaf.start + lo, leaf.start + hi) for lo, hi in _in_arguments(text, names))
            key = None
    return [hit for hit in out if hit.start < hit.end]


def _hit(start: int, end: int) -> Hit:
    return Hit(start, end, KIND, "schema", False)


def _marks(value: Any) -> Iterator[str]:
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
            properties = value.get("properties")
            if isinstance(properties, dict):
                yield from (
                    name
                    for name, about in properties.items()
                    if isinstance(about, dict) and about.get("x-personal") is True
                )


def _values(buffer: Buffer, source: int, names: frozenset[bytes]) -> list[tuple[int, int]]:
    """Where lists and maps stand that are values of fields, and no schemas of them."""
    content = buffer.documents[source]
    if not any(name in content.data for name in names):
        return []
    return [(lo, hi) for lo, hi in content.values_of(names) if _MARK not in content.data[lo:hi]]


def _in_arguments(text: bytes, names: frozenset[bytes]) -> Iterator[tuple[int, int]]:
    """The same in JSON that is a string of JSON, as arguments of calls are."""
    try:
        content = document(text)
    except TooDeep:
        return
    if content is None:
        return
    spans = content.values_of(names)
    is_value = False
    for token in content.tokens():
        if token.kind == KEY:
            is_value = token.value in names
            continue
        if (is_value and token.beside) or any(lo <= token.lo < hi for lo, hi in spans):
            quote = text[token.lo : token.lo + 1] == b'"'
            yield token.lo + quote, token.hi - quote
        is_value = False
