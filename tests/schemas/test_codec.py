"""The codec: what was encoded is decoded, and everything else is a named error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fastavro.utils import generate_many
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.schemas import arrays, codec, registry
from millrace.schemas.errors import CorruptRecord, UnknownSchema


def same(left: Any, right: Any) -> bool:
    """Equality that lets float rounding and NaN pass, as Avro's 4-byte floats need."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return math.isclose(left, right, rel_tol=1e-6) or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


@pytest.mark.parametrize("name", registry.names())
def test_every_record_comes_back_as_it_went_in(name: str) -> None:
    for record in generate_many(registry.current(name).definition, 5):
        found, again = codec.decode(codec.encode(name, record))
        assert found == name
        assert same(record, again)


@given(st.binary(max_size=64))
def test_foreign_bytes_are_a_named_error(data: bytes) -> None:
    with pytest.raises((CorruptRecord, UnknownSchema)):
        codec.decode(data)


@settings(max_examples=60)
@given(st.data())
def test_a_truncated_record_never_decodes(data: st.DataObject) -> None:
    encoded = codec.encode("Place", {"topic": "millrace.raw", "partition": 3, "offset": 2**40})
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises((CorruptRecord, UnknownSchema)):
        codec.decode(encoded[:cut])


def test_trailing_bytes_are_corrupt() -> None:
    encoded = codec.encode("Place", {"topic": "t", "partition": 0, "offset": 0})
    with pytest.raises(CorruptRecord, match="follow"):
        codec.decode(encoded + b"\0")


def test_a_record_that_does_not_fit_names_its_schema() -> None:
    with pytest.raises(CorruptRecord, match="not a Place"):
        codec.encode("Place", {"topic": "t", "partition": "zero", "offset": 0})
    with pytest.raises(CorruptRecord, match="not a Place"):
        codec.encode("Place", {"topic": "t"})
    with pytest.raises(UnknownSchema, match="Nonsense"):
        codec.encode("Nonsense", {})


def test_another_record_than_expected_is_refused() -> None:
    encoded = codec.encode("Place", {"topic": "t", "partition": 0, "offset": 0})
    assert codec.name_of(encoded) == "Place"
    with pytest.raises(CorruptRecord, match="expected a Grant, found a Place"):
        codec.decode_as("Grant", encoded)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_arrays_keep_every_element(values: list[int]) -> None:
    assert arrays.unpack(arrays.pack(values, "int32")).tolist() == values


def test_ragged_and_foreign_arrays_are_refused() -> None:
    with pytest.raises(CorruptRecord):
        arrays.unpack({"dtype": "int32", "data": b"123"})
    with pytest.raises(CorruptRecord):
        arrays.pack(np.zeros(1, np.complex64))
