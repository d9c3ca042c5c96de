"""An unknown key, at any depth of a record, is a named error; a record without one is written as fastavro writes it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from fastavro import schemaless_writer
from fastavro.utils import generate_many
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.infra.stages.base import Emit, Later
from millrace.infra.stages.outbox import encode_emit
from millrace.schemas import codec, registry
from millrace.schemas.errors import CorruptRecord, SchemaError, UnknownKey


@cache
def examples(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(generate_many(registry.current(name).definition, 8))


def records_in(kind: Any, value: Any, known: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(schema, record) of a record and of every record inside it, the outer ones first. Written apart from `strict`."""
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), None) if value is not None else None
    if isinstance(kind, str):
        kind = known.get(kind)
    if not isinstance(kind, dict):
        return
    if kind["type"] == "record":
        known[kind["name"]] = kind
        yield kind, value
        for field in kind["fields"]:
            yield from records_in(field["type"], value.get(field["name"]), known)
    elif kind["type"] == "array":
        for each in value:
            yield from records_in(kind["items"], each, known)
    elif kind["type"] == "map":
        for each in value.values():
            yield from records_in(kind["values"], each, known)


def test_a_misspelt_key_is_named_with_the_key_that_was_meant() -> None:
    with pytest.raises(SchemaError, match="a Progress has no key 'tmie': did you mean 'time'"):
        codec.encode("Progress", {"stage": "refine", "slot": 0, "time": 5, "tmie": 5})


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(registry.names()), st.data())
def test_an_unknown_key_at_any_depth_is_refused_by_its_name(name: str, data: st.DataObject) -> None:
    record = deepcopy(data.draw(st.sampled_from(examples(name))))
    inside = list(records_in(registry.current(name).definition, record, {}))
    schema, planted = data.draw(st.sampled_from(inside))
    fields = {field["name"] for field in schema["fields"]}
    misspelt = st.sampled_from(sorted(fields)).flatmap(lambda key: st.permutations(key).map("".join))
    key = data.draw(st.one_of(misspelt, st.text(max_size=12)).filter(lambda key: key not in fields))
    planted[key] = data.draw(st.none() | st.integers() | st.text(max_size=3))
    with pytest.raises(UnknownKey) as caught:
        codec.encode(name, record)
    short = schema["name"].removeprefix("millrace.")
    assert str(caught.value).startswith(f"a {short} has no key {key!r}")
    assert any(repr(field) in str(caught.value) for field in fields)


@settings(deadline=None)
@given(st.sampled_from(registry.names()), st.data())
def test_what_has_no_unknown_key_is_written_as_fastavro_writes_it(name: str, data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(examples(name)))
    schema, out = registry.current(name), io.BytesIO()
    schemaless_writer(out, schema.definition, record)
    assert codec.encode(name, record) == codec.MARK + schema.fingerprint + out.getvalue()


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(registry.names()), st.data())
def test_whatever_lies_where_a_record_belongs_is_an_error_of_the_codec(name: str, data: st.DataObject) -> None:
    record = deepcopy(data.draw(st.sampled_from(examples(name))))
    field = data.draw(st.sampled_from(sorted(record)))
    odd = st.one_of(
        st.none(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3), st.just(Later("ref")),
        st.lists(st.none() | st.integers() | st.text(max_size=3), max_size=3),
        st.dictionaries(st.integers() | st.text(max_size=3), st.none() | st.integers(), max_size=3),
    )  # fmt: skip
    record[field] = data.draw(odd)
    try:
        codec.encode(name, record)
    except CorruptRecord:
        """Refused, by one side or the other."""


def test_a_key_beside_a_place_that_is_not_known_yet_is_found_too() -> None:
    lineage = {"id": "l", "tokens": Later("sample"), "idd": 1}
    with pytest.raises(UnknownKey, match="a Lineage has no key 'idd'"):
        encode_emit(Emit("p.trajectories", "g", "Trajectory", examples("Trajectory")[0] | {"lineages": [lineage]}))


def test_an_error_does_not_grow_with_the_key() -> None:
    with pytest.raises(UnknownKey) as caught:
        codec.encode("Progress", {"stage": "s", "slot": 0, "time": 5, "x" * 100_000: 5})
    assert len(str(caught.value)) < 300
