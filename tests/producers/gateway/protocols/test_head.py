"""What a request says is read as far as it can be; a value that nobody can hold is in no record, and ends nothing."""

from __future__ import annotations

import pytest

from millrace.producers.gateway.protocols.head import read_head


@pytest.mark.parametrize("digits", [19, 400, 5000, 60_000])
def test_a_whole_number_of_any_length_is_read_or_left_out(digits: int) -> None:
    head = read_head(b'{"model":"m","seed":{"index":' + b"9" * digits + b"}}")
    assert head.model == "m"
    assert head.seed in (None, {"index": int("9" * min(digits, 4000))}, {"index": float("9" * min(digits, 300))})
