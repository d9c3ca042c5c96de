"""Where things stand in a JSON text, against what a parser says of it."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.schemas import bounds
from millrace.streams.refine.documents import Document, TooDeep


class Pairs(list[tuple[str, Any]]):
    """A map, whose keys may repeat."""


NAMES = frozenset({b"logprobs", b"token_ids"})
TEXT = st.text(max_size=6) | st.sampled_from(["logprobs", "token_ids", '"', "\\", '\\"', "[{", "}]", "\\\\"])
JSON = st.recursive(
    st.none() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(TEXT, inner), max_size=4).map(Pairs),
)


def text_of(value: Any, spaces: str) -> str:
    """JSON text of a value, with spaces wherever they may be and some keys escaped."""
    if isinstance(value, Pairs):
        entries = (f"{key_of(key)}{spaces}:{spaces}{text_of(inner, spaces)}" for key, inner in value)
        return f"{{{spaces}" + f"{spaces},{spaces}".join(entries) + f"{spaces}}}"
    if isinstance(value, list):
        return f"[{spaces}" + f"{spaces},{spaces}".join(text_of(inner, spaces) for inner in value) + f"{spaces}]"
    return json.dumps(value)


def key_of(key: str) -> str:
    escaped = key.replace("o", "\0")
    return json.dumps(key) if len(key) % 2 else json.dumps(escaped).replace("\\u0000", "\\u006f")


def outermost(value: Any, spaces: str) -> list[str]:
    """The lists and maps under NAMES, and in none that is under one."""
    if not isinstance(value, list):
        return []
    found: list[str] = []
    for entry in value:
        named = isinstance(value, Pairs) and entry[0].encode() in NAMES
        inner = entry[1] if isinstance(value, Pairs) else entry
        found += [text_of(inner, spaces)] if named and isinstance(inner, list) else outermost(inner, spaces)
    return found


def depth(value: Any) -> int:
    if not isinstance(value, list):
        return 0
    inner = (entry[1] for entry in value) if isinstance(value, Pairs) else value
    return 1 + max(map(depth, inner), default=0)


@given(st.lists(JSON, max_size=5), st.sampled_from(["", " ", "\n\t"]))
def test_values_of_names_are_where_a_parser_finds_them(value: list[Any], spaces: str) -> None:
    text = text_of(value, spaces)
    data = text.encode()
    orjson.loads(data)
    found = [data[lo:hi].decode() for lo, hi in Document(data).values_of(NAMES)]
    assert found == outermost(value, spaces)


@given(st.lists(JSON, max_size=5), st.sampled_from(["", " "]), st.booleans())
def test_every_string_is_among_the_values_once(value: list[Any], spaces: str, escaped: bool) -> None:
    text = text_of([*value, "\\"] if escaped else value, spaces).encode()
    document = Document(text)
    assert document.values() == list(dict.fromkeys(token.value for token in document.tokens()))


@given(JSON, st.integers(0, 2 * bounds.DEPTH), st.booleans())
def test_what_is_too_deep_is_told_by_its_depth(value: Any, around: int, crowded: bool) -> None:
    for n in range(around):
        value = Pairs([("k", value)]) if n % 3 else [[], value, 1] if crowded else [value]
    value = [value]
    text = text_of(value, "").encode()
    if depth(value) > bounds.DEPTH:
        with pytest.raises(TooDeep):
            Document(text)
    else:
        Document(text)
