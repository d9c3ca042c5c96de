"""What a request says is read as far as it can be; a value that nobody can hold is in no record, and ends nothing."""

from __future__ import annotations

import pytest

from millrace.dialects.errors import ApiError
from millrace.dialects.reading.head import FIELDS, read_head, rename_model


@pytest.mark.parametrize("digits", [19, 400, 5000, 60_000])
def test_a_whole_number_of_any_length_is_read_or_left_out(digits: int) -> None:
    head = read_head(b'{"model":"m","seed":{"index":' + b"9" * digits + b"}}")
    assert head.model == "m"
    assert head.seed in (None, {"index": int("9" * min(digits, 4000))}, {"index": float("9" * min(digits, 300))})


@pytest.mark.parametrize("value", [b'"\xff"', b'"a\\q"', b'{"a":"\x9e"}', b'"\x01\x9e"'], ids=repr)
@pytest.mark.parametrize("field", FIELDS)
def test_a_value_that_is_no_text_of_json_is_refused(field: str, value: bytes) -> None:
    """A parser that skips a value does not look at its bytes."""
    with pytest.raises(ApiError, match="not valid JSON") as refused:
        read_head(b'{"%s":%s}' % (field.encode(), value))
    assert refused.value.status == 400


def test_the_last_of_two_fields_of_one_name_goes_on_where_a_request_is_renamed() -> None:
    assert rename_model(b'{"model":"a","x":1,"x":2.0,"model":"b"}', "n") == b'{"model":"n","x":2.0}'
