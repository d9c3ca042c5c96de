"""A request is shortened to what is new in it, and put together again to the same bytes, whatever it holds."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.schemas import requests
from millrace.schemas.limits import beyond
from millrace.schemas.requests import (
    LEAST,
    MOST_ITEMS,
    WHOLE,
    RequestStore,
    in_common,
    outline,
    outline_request,
    rebuild,
    shorten,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
SPACES = st.sampled_from(["", " ", "\n  ", "\t"])
LONG_TEXT = st.text(min_size=120, max_size=200)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": LONG_TEXT | JSON}),
    max_size=6,
)


@st.composite
def spelled(draw: st.DrawFn, value: Any) -> bytes:
    """A JSON text of a value, spaced and escaped like no other."""
    spaced = draw(SPACES)
    text = json.dumps(
        value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])), separators=(f"{spaced},", ":")
    )
    return f"{draw(SPACES)}{text}{draw(SPACES)}".encode("utf-8", "surrogatepass")


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """An earlier request, and a later one that says some of it again."""
    first, more = draw(MESSAGES), draw(MESSAGES)
    tools, rules = draw(st.lists(JSON, max_size=3)), draw(LONG_TEXT)
    kept = first[: draw(st.integers(0, len(first)))]
    said: list[dict[str, Any]] = [
        {"model": "m", "messages": first, "tools": tools, "instructions": rules},
        {"model": "n", "messages": kept + more, "tools": tools, "instructions": rules, "n": 2},
    ]
    if draw(st.booleans()):  # in another order
        said[1] = dict(reversed(said[1].items()))
    one, other = (draw(spelled(value)) for value in said)
    return one, other


def whole_again(first: bytes, second: bytes) -> tuple[bytes, dict[str, int]] | None:
    """What is stored of the second request, checked to say the whole of it; None where it is stored whole."""
    ours, theirs = outline_request(second), outline_request(first)
    if ours is None or theirs is None:
        return None
    kept, saved = in_common(ours, theirs.digests)
    short = shorten(ours, kept)
    if not kept or short is None:
        return None
    assert len(second) - len(short) <= saved <= len(second) - len(short) + 5 * len(kept)
    assert rebuild(short, kept, first) == second
    return short, kept


@given(conversations())
def test_what_is_left_out_is_put_in_again(pair: tuple[bytes, bytes]) -> None:
    found = whole_again(*pair)
    if found is not None:
        short, kept = found
        said = orjson.loads(short)
        assert list(said) == list(orjson.loads(pair[1])), "JSON of the same form"
        assert all(said[key] is None for key, count in kept.items() if count == WHOLE)


@given(
    st.lists(st.binary(max_size=200) | st.sampled_from([b'{"a":[', b'"', b"\\", b",", b"]}", b"{}", b":"]), max_size=20)
)
@example([b'{"a":"' + b"\\" * 3 + b'","a":[1]}' + b" " * LEAST])
def test_no_bytes_raise_or_come_back_otherwise(parts: list[bytes]) -> None:
    body = b"".join(parts)
    filled = body + b" " * LEAST
    outline(body)
    for first in (filled, body, b'{"a":[1,2]}'):
        whole_again(first, filled)
        rebuild(body, {"a": 1, "b": WHOLE}, first)


def test_a_conversation_that_goes_on_says_what_is_new() -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{n}", "description": "d" * 100}} for n in range(9)]
    said = [{"role": "user", "content": f"{n} " + "x" * 300} for n in range(20)]
    first = json.dumps({"model": "m", "messages": said[:18], "tools": tools, "instructions": "y" * 500}).encode()
    second = json.dumps({"model": "m", "messages": said, "tools": tools, "instructions": "y" * 500}).encode()
    found = whole_again(first, second)
    assert found is not None
    short, kept = found
    assert kept == {"messages": 18, "tools": 9, "instructions": WHOLE}
    assert orjson.loads(short) == {"model": "m", "messages": said[18:], "tools": [], "instructions": None}
    again = whole_again(second, second)
    assert again is not None
    assert orjson.loads(again[0])["messages"] == [], "a retry says nothing new"


def test_a_key_that_comes_twice_is_stored_whole() -> None:
    text = b'{"messages":["%b"],"messages":["%b"]}' % (b"x" * LEAST, b"y" * LEAST)
    found = outline_request(text)
    assert found is not None
    assert not found.digests


def test_what_is_too_long_to_compare_is_stored_whole() -> None:
    assert outline_request(json.dumps({"prompt": list(range(MOST_ITEMS + 1))}).encode()) is None


def test_what_is_kept_is_within_the_bounds_of_a_record() -> None:
    body = json.dumps({"x" * 2000: [1, 2], **{f"{n:04}" * 60: "y" * 300 for n in range(2000)}}).encode()
    found = whole_again(body, body)
    assert found is not None
    assert beyond("ModelCall", {"request": found[0], "request_kept": found[1]}) is None


def test_what_does_not_fit_is_not_made_up() -> None:
    base = b'{"messages":["a","b"],"rules":"r"}'
    assert rebuild(b'{"messages":["c"]}', {"messages": 2}, base) == b'{"messages":["a","b","c"]}'
    assert rebuild(b'{"messages":[]}', {"messages": 1}, base) == b'{"messages":["a"]}'
    assert rebuild(b'{"rules":null}', {"rules": WHOLE}, base) == b'{"rules":"r"}'
    for request, kept in (
        (b'{"messages":["c"]}', {"messages": 3}),
        (b'{"messages":["c"]}', {"messages": 0}),
        (b'{"messages":"c"}', {"messages": 1}),
        (b'{"rules":"mine"}', {"rules": WHOLE}),
        (b'{"other":[]}', {"other": 1}),
        (b"[]", {"messages": 1}),
        (b"", {"messages": 1}),
    ):
        assert rebuild(request, kept, base) is None


def stored(request: bytes, base: str | None = None, **kept: int) -> dict[str, Any]:
    return {"request": request, "request_base": base, "request_kept": kept}


def test_a_store_puts_a_chain_together_in_any_order_and_raises_for_no_circle() -> None:
    store = RequestStore()
    chain = 3000  # beyond what could be called in one another
    assert store.add("e0", stored(b'{"messages":["0"]}')) == b'{"messages":["0"]}'
    for n in range(chain - 1, 0, -1):
        assert store.add(f"e{n}", stored(b'{"messages":["%d"]}' % n, f"e{n - 1}", messages=n)) is None or n == 1
    whole = store.full_request(f"e{chain - 1}")
    assert whole is not None
    assert orjson.loads(whole) == {"messages": [str(n) for n in range(chain)]}
    assert store.add("a", stored(b'{"messages":[]}', "b", messages=1)) is None
    assert store.add("b", stored(b'{"messages":[]}', "a", messages=1)) is None
    assert store.add("c", stored(b'{"messages":[]}', "c", messages=1)) is None
    assert store.add("d", stored(b'{"messages":[]}', "gone", messages=1)) is None


@given(conversations(), st.binary(max_size=60))
def test_both_ways_of_counting_find_the_same(pair: tuple[bytes, bytes], odd: bytes) -> None:
    for body in (*pair, odd, pair[0] + odd):
        if b"\\" not in body:
            assert requests._few_marks(body) == requests._many_marks(body)
