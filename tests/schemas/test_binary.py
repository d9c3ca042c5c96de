"""What the functions made for a schema give is what fastavro gives; what they are not made for they raise for."""

from __future__ import annotations

import io
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

from fastavro import schemaless_reader, schemaless_writer
from hypothesis import given
from hypothesis import strategies as st

from millrace.schemas import registry
from millrace.schemas.binary import Binary, binary_of

NAMES = st.sampled_from(registry.names())
PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(max_size=80),
    "bytes": st.binary(max_size=80),
    "boolean": st.booleans(),
    "double": st.floats(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.text(max_size=3) | st.just("\ud800"),
    st.binary(max_size=3) | st.binary(max_size=3).map(bytearray),
    st.just([]) | st.just(()) | st.just({}) | st.just(("string", "x")) | st.just([1]) | st.just({1: 2}),
)


@cache
def binary(name: str) -> Binary:
    return binary_of(registry.current(name).parsed)


def values(kind: Any, known: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Whatever fits a type."""
    if isinstance(kind, list):
        return st.one_of(*(values(each, known) for each in kind))
    kind = known.get(kind, kind) if isinstance(kind, str) else kind
    match kind if isinstance(kind, str) else kind["type"]:
        case "null":
            return st.none()
        case "record":
            return st.fixed_dictionaries({f["name"]: values(f["type"], known) for f in kind["fields"]})
        case "enum":
            return st.sampled_from(kind["symbols"])
        case "array":
            return st.lists(values(kind["items"], known), max_size=3)
        case "map":
            return st.dictionaries(st.text(max_size=70), values(kind["values"], known), max_size=3)
        case plain:
            return PLAIN[plain]


@cache
def records(name: str) -> st.SearchStrategy[dict[str, Any]]:
    parsed = registry.current(name).parsed
    return values(parsed, parsed["__named_schemas"])


def by_fastavro(name: str, record: Any) -> bytes | None:
    out = io.BytesIO()
    try:
        schemaless_writer(out, registry.current(name).parsed, record)
    except Exception:
        return None
    return out.getvalue()


def written(name: str, record: Any) -> bytes:
    pieces: list[bytes] = []
    binary(name).write(record, pieces.append)
    return b"".join(pieces)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(list or map, position or key) of everything inside a value."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


@given(NAMES, st.data())
def test_every_record_is_written_and_read_as_fastavro_does(name: str, data: st.DataObject) -> None:
    record = data.draw(records(name))
    out = written(name, record)
    assert out == by_fastavro(name, record)
    read, end = binary(name).read(b"head" + out, 4)
    assert end == 4 + len(out)
    assert repr(read) == repr(schemaless_reader(io.BytesIO(out), registry.current(name).parsed, None))


@given(NAMES, st.data())
def test_a_record_that_is_none_is_written_as_fastavro_writes_it_or_raises(name: str, data: st.DataObject) -> None:
    record = deepcopy(data.draw(records(name)))
    holder, key = data.draw(st.sampled_from(list(places(record))))
    if isinstance(holder, dict) and data.draw(st.booleans()):
        del holder[key]
    else:
        holder[key] = data.draw(ODD)
    try:
        out = written(name, record)
    except Exception:
        return
    assert out == by_fastavro(name, record)


@given(NAMES, st.data())
def test_bytes_that_were_changed_are_read_as_fastavro_reads_them_or_not_whole(name: str, data: st.DataObject) -> None:
    out = bytearray(written(name, data.draw(records(name))))
    at = data.draw(st.integers(0, len(out)))
    out[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=11))
    try:
        record, end = binary(name).read(bytes(out), 0)
    except Exception:
        return
    if end == len(out):
        stream = io.BytesIO(out)
        assert repr(record) == repr(schemaless_reader(stream, registry.current(name).parsed, None))
        assert stream.tell() == end
