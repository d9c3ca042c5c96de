"""The columns of a record: names, types and comments from its Avro schema, and how each is read from Avro bytes.

The rules, which hold for every table:

- A field is a column of its own name; fields of a nested record follow behind its name and `_` (`source_place_offset`,
  `governance_eligibility`).
- A list of records is Nested: one array a field, all of one length (`groups.seq`, `lineages.tokens`). Records inside
  such a list are tuples (`groups.trajectories` is Array(Array(Tuple(topic, partition, offset)))).
- A numeric array (`millrace.Array`) is an array of its numbers: Int32, Int64, Float32 or UInt8, as its comment begins.
- What may be null is Nullable; what counts micros is a DateTime64(6) in UTC; enums, and strings of few values, are
  LowCardinality; bytes are a String (`hex()` shows a hash).
- An event has the fields of its body too, each behind the kind and `_`: `model_call_finish_reason`,
  `tool_call_name`, `reward_value`. Columns of the other kinds hold their defaults: ask for `kind` as well.

Invariant: a column's name and type follow from the schema alone, so that a field that is new is a column that is new.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from millrace.schemas.registry import AVRO, BODIES, NAMESPACE

# fmt: off
LOW = frozenset((
    "actor", "agent", "author", "classification", "code_hash", "config_hash", "cpu", "engine", "engine_incarnation",
    "engine_version", "failure", "finish_reason", "guardrail", "harness", "host", "identified_by", "layout",
    "media_type", "memory", "mode", "name", "opened", "origin", "policy", "policy_version", "prompt",
    "redaction_version", "replay", "residency", "retrieval", "role", "rubric_version", "side_effect",
    "signal", "source", "source_version", "stage", "stop_condition", "template_hash", "tenant", "tokenizer_hash",
    "tool_version", "topic", "untrainable_reason", "worker",
))
"""names of string fields with few values"""
# fmt: on
TEXT = frozenset(
    ("request", "response", "content", "task", "output", "arguments", "critique", "text", "summary", "config")
)
"""names of string fields that are long"""
SCALARS = {
    "string": "String",
    "bytes": "String",
    "int": "Int32",
    "long": "Int64",
    "float": "Float32",
    "double": "Float64",
    "boolean": "Bool",
}
NUMBERS = {"int32": "Int32", "int64": "Int64", "float32": "Float32", "uint8": "UInt8"}
"""dtype of a numeric array -> type of its elements"""
MICROS = "DateTime64(6, 'UTC')"
DTYPE = re.compile("|".join(NUMBERS))
Schema = Any


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `reads`: what it takes from the Avro bytes, as paths and types; `value`: its value by these, in SQL.
    Paths are those of ClickHouse's Avro format."""

    name: str
    type: str
    doc: str
    codec: str = "ZSTD(1)"
    reads: tuple[tuple[str, str], ...] = ()
    value: str = ""

    @property
    def definition(self) -> str:
        """As it stands in CREATE TABLE and ADD COLUMN."""
        return f"{backtick(self.name)} {self.type} CODEC({self.codec}) COMMENT {text(self.doc)}"


def backtick(name: str) -> str:
    """A name in SQL."""
    return f"`{name}`"


def text(value: str) -> str:
    """A string in SQL."""
    body = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{body}'"


def columns_of(record: str) -> tuple[Column, ...]:
    """The columns of a record, in the order of its fields; an event's body has those of every kind behind them."""
    columns = list(_fields(record, path="", name="", nullable=False, skip=("body",) if record == "Event" else ()))
    if record == "Event":
        for kind, body in BODIES.items():
            columns += _fields(body, path=f"body.{body}.", name=f"{kind}_", nullable=False)
    return tuple(columns)


def _fields(record: str, *, path: str, name: str, nullable: bool, skip: tuple[str, ...] = ()) -> Iterator[Column]:
    for field in schema_of(record)["fields"]:
        if field["name"] not in skip:
            yield from _columns(field, f"{path}{field['name']}", f"{name}{field['name']}", nullable)


def _columns(field: Schema, path: str, name: str, nullable: bool) -> Iterator[Column]:
    """The columns of one field."""
    kind, doc, leaf = field["type"], field["doc"], field["name"]
    if isinstance(kind, list):
        kind, nullable = _of_union(kind), True
        if _is_record(kind):
            path += f".{kind.removeprefix(NAMESPACE + '.')}"
    match kind:
        case {"type": "array", "items": str(items)} if _is_record(items):
            yield from _nested_columns(items, path, name)
        case str() if _is_record(kind) and kind != f"{NAMESPACE}.Array":
            yield from _fields(kind.removeprefix(NAMESPACE + "."), path=f"{path}.", name=f"{name}_", nullable=nullable)
        case str() if kind == f"{NAMESPACE}.Array":
            dtype = dtype_of(doc)
            reads = ((f"{path}.dtype", "String"), (f"{path}.data", "String"))
            value = _numbers(dtype, backtick(f"{path}.dtype"), backtick(f"{path}.data"))
            yield Column(name, f"Array({NUMBERS[dtype]})", doc, reads=reads, value=value)
        case _:
            scalar = _scalar_type(kind, doc, leaf, nullable)
            column_type = f"LowCardinality({scalar})" if _is_low(kind, leaf) else scalar
            codec = "Delta, ZSTD(1)" if column_type == MICROS else "ZSTD(3)" if leaf in TEXT else "ZSTD(1)"
            yield Column(name, column_type, doc, codec, ((path, scalar),), backtick(path))


def _nested_columns(record: str, path: str, name: str) -> Iterator[Column]:
    """One array a field, of a list of records that is read as a whole."""
    reads = ((path, f"Array({_tuple(record)})"),)
    for field in schema_of(record)["fields"]:
        leaf, kind = field["name"], field["type"]
        if kind == f"{NAMESPACE}.Array":
            dtype = dtype_of(field["doc"])
            inner = f"Array({NUMBERS[dtype]})"
            value = f"arrayMap(x -> {_numbers(dtype, f'x.{leaf}.dtype', f'x.{leaf}.data')}, {backtick(path)})"
        else:
            inner = _inner(kind, field["doc"])
            inner = f"LowCardinality({inner})" if _is_low(kind, leaf) else inner
            value = f"tupleElement({backtick(path)}, {text(leaf)})"
        yield Column(f"{name}.{leaf}", f"Array({inner})", field["doc"], reads=reads, value=value)


def _tuple(record: str) -> str:
    """A record inside a list, as it is read."""
    fields = schema_of(record)["fields"]
    inner = (f"{backtick(field['name'])} {_inner(field['type'], field['doc'])}" for field in fields)
    return f"Tuple({', '.join(inner)})"


def _inner(kind: Schema, doc: str, nullable: bool = False) -> str:
    """The type of a field of a record inside a list."""
    match kind:
        case list():
            return _inner(_of_union(kind), doc, nullable=True)
        case {"type": "array", "items": items}:
            return f"Array({_inner(items, '')})"
        case str() if _is_record(kind):
            return _tuple(kind)
        case _:
            return _scalar_type(kind, doc, "", nullable)


def _scalar_type(kind: Schema, doc: str, leaf: str, nullable: bool) -> str:
    """The type of a value that is no record, as it is read."""
    match kind:
        case {"type": "array", "items": items}:
            return f"Array({_scalar_type(items, '', '', False)})"
        case {"type": "map", "values": values}:
            return f"Map(String, {_scalar_type(values, '', '', False)})"
        case "long" if doc.startswith("micros"):
            scalar = MICROS
        case _:
            scalar = SCALARS.get(kind, "String")  # what is left is an enum
    return f"Nullable({scalar})" if nullable else scalar


def _numbers(dtype: str, tag: str, data: str) -> str:
    """SQL of the numbers in `data`, whose dtype `tag` says; another one than the schema's is converted."""
    reading = f"reinterpret({data}, 'Array({NUMBERS[dtype]})')"
    conversions = ", ".join(
        f"{tag} = '{source}', CAST(reinterpret({data}, 'Array({kind})'), 'Array({NUMBERS[dtype]})')"
        for source, kind in NUMBERS.items()
        if source != dtype
    )
    return f"multiIf({tag} = '{dtype}', {reading}, {conversions}, [])"


def dtype_of(doc: str) -> str:
    """The dtype of a numeric array, with which its documentation begins."""
    match = DTYPE.match(doc)
    assert match, f"the documentation of a numeric array begins with its dtype: {doc!r}"
    return match.group()


def _of_union(kind: list[Schema]) -> Schema:
    """What a field holds that may be null."""
    branches = [branch for branch in kind if branch != "null"]
    (only,) = branches  # the schemas have no other unions
    return only


def _is_record(kind: Schema) -> bool:
    return isinstance(kind, str) and kind.startswith(f"{NAMESPACE}.") and schema_of(kind)["type"] == "record"


def _is_enum(kind: Schema) -> bool:
    return isinstance(kind, str) and kind.startswith(f"{NAMESPACE}.") and schema_of(kind)["type"] == "enum"


def _is_low(kind: Schema, leaf: str) -> bool:
    one = _of_union(kind) if isinstance(kind, list) else kind
    return _is_enum(one) or (one == "string" and leaf in LOW)


@cache
def schema_of(name: str) -> Schema:
    """Today's schema of a record or an enum, as its file says, with the types of other files by name."""
    return json.loads((AVRO / f"{name.removeprefix(NAMESPACE + '.')}.avsc").read_text())
