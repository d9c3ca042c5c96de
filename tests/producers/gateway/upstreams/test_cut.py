"""A stream in pieces that end where events end: nothing is lost, and the work grows with the bytes alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.producers.gateway.upstreams import upstream_call
from millrace.producers.gateway.upstreams.upstream_call import ENDS, OVERLAP, Cut
from millrace.schemas import bounds

text = st.lists(st.sampled_from([b"data: x", b"\n", b"\r\n", b"\r", *ENDS]), max_size=20).map(b"".join)


@given(text, st.lists(st.integers(0, 60), max_size=8))
def test_pieces_are_whole_events_wherever_the_parts_are_cut(data: bytes, places: list[int]) -> None:
    one, out = Cut(), b""
    for start, end in pairwise([0, *sorted(min(place, len(data)) for place in places), len(data)]):
        piece = one.feed(data[start:end])
        assert not piece or piece.endswith(ENDS)
        out += piece
        assert out + one.rest == data[:end]
        assert not any(end in one.rest for end in ENDS)
    assert out + one.rest == data


def test_the_work_of_a_long_event_grows_with_its_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    searched, behind = 0, upstream_call.behind

    def counted(data: bytes) -> int:
        nonlocal searched
        searched += len(data)
        return behind(data)

    monkeypatch.setattr(upstream_call, "behind", counted)
    one, parts, out = Cut(), bounds.EVENT_BYTES // 100 + 200, b""
    for _ in range(parts):
        out += one.feed(b"x" * 100)
        assert len(one.rest) <= bounds.EVENT_BYTES, "what is held back has a bound"
    assert searched <= parts * (100 + OVERLAP)
    assert out + one.rest == b"x" * 100 * parts
    assert out
