"""What a broadcast is cut into, and its ends without each other. `tests/consumers/reloader` sends whole files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.trainers.weights import broadcast


@given(st.integers(0, 3 * broadcast.PIECE))
def test_pieces_tile_what_is_sent_and_have_a_middle(size: int) -> None:
    found = list(broadcast.pieces(size))
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])][: len(found)]
    assert sum(end - begin for begin, end in found) == size
    assert all(0 < end - begin <= broadcast.PIECE for begin, end in found)
    assert len(found) >= min(size, 2)


def test_a_sender_that_is_gone_is_not_waited_for() -> None:
    header = b"\x02\x00\x00\x00\x00\x00\x00\x00{}"
    with pytest.raises(RuntimeError, match="is gone"):
        broadcast.receive(LOCALHOST, free_ports(1)[0], 1, 1, header, "", timeout_s=3600)
