"""Streams cut into lines and events, however their bytes are cut; and what an id is told apart by."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.producers.intake.jsonrpc import EventCutter, Lines, TooLong, WholeMessage, id_of, member, messages
from tests.support import odd_json

CUTS = st.lists(st.integers(0, 400), max_size=12)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(place, len(data)) for place in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


def read(cutter: Lines | EventCutter, data: bytes, cuts: list[int]) -> list[bytes | TooLong]:
    found = [piece for part in cut(data, cuts) for piece in cutter.feed(part)]
    return [*found, *cutter.end()]


@given(
    st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=8), CUTS, st.integers(1, 50)
)
def test_lines_are_the_same_however_they_come(lines: list[bytes], cuts: list[int], limit: int) -> None:
    data = b"".join(line + b"\n" for line in lines)
    assert read(Lines(limit), data, cuts) == [line if len(line) <= limit else TooLong(len(line)) for line in lines]
    assert read(Lines(), data + b"rest", cuts) == [*lines, b"rest"]
    assert read(WholeMessage(), data, cuts) == ([data] if data else [])


@given(st.data(), CUTS)
def test_events_are_the_same_however_they_come_and_whatever_ends_a_line(data: st.DataObject, cuts: list[int]) -> None:
    text = st.text("ab :{}", max_size=8)
    events = data.draw(st.lists(st.lists(text, min_size=1, max_size=3), max_size=5))
    wire, expected = "", []
    for lines in events:
        end = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
        extra = data.draw(st.sampled_from(["", f": ping{end}", f"event: message{end}", f"id: 7{end}"]))
        wire += extra + "".join(f"data: {line}{end}" for line in lines) + end
        expected.append("\n".join(lines).encode())
    assert read(EventCutter(), wire.encode(), cuts) == expected
    assert read(EventCutter(), wire.encode() + b"data: cut off", cuts) == expected


def test_an_event_beyond_the_limit_is_its_size() -> None:
    short = b"data: " + b"x" * 4 + b"\n"
    assert list(EventCutter(10).feed(3 * short + b"\n" + short + b"\n")) == [12, b"xxxx"]
    found = list(EventCutter(10).feed(b"data: " + b"x" * 60 + b"\n\n" + short + b"\n"))
    assert [type(piece) for piece in found] == [TooLong, bytes]


IDS = ["1", "2", "1.5", '"1"', '"2"', '"a"', "null", "true", "false", "[1]", '{"a":1}', '"\\u00e9"', "1e20"]


def test_ids_are_told_apart_whatever_json_they_are() -> None:
    read_ids = [id_of(messages(f'{{"id":{id}}}'.encode())[0]) for id in IDS]
    assert len(set(read_ids)) == len(IDS)
    assert None not in read_ids
    assert id_of(messages(b'{"method":"x"}')[0]) is None
    assert id_of(messages(b'{"id":1.0}')[0]) == id_of(messages(b'{"id": 1 }')[0])
    assert id_of(messages('{"id":"é"}'.encode())[0]) == id_of(messages(b'{"id":"\\u00e9"}')[0])


@pytest.mark.parametrize(
    "line", [b"{", b"nonsense", b"1", b'"a"', b"[1]", b'{"a":1}}', b"\xff", b'{"a":NaN}', b"[" * 9999]
)
def test_what_is_no_message_says_so(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        messages(line)


@given(st.integers())
def test_odd_json_is_read_or_refused(seed: int) -> None:
    r = random.Random(seed)
    line = odd_json.broken(r, json.dumps({"id": 1, "method": "tools/call", "params": {"name": "f"}}).encode())
    try:
        found = messages(line)
    except ValueError:
        return
    for message in found:
        id_of(message), member(message, "method"), member(message, "params")
