"""Every schema this release can read: `avro/*.avsc` as written today, and `history/` as written before.

Invariant: a fingerprint names one schema forever. A changed file in `avro/` gets a new fingerprint; its former text is
kept in `history/<Name>/<fingerprint>.avsc`, fully expanded, so that old bytes stay readable (`python -m
millrace.schemas.generate` keeps it)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NotRequired, TypeAlias, TypedDict, cast

import fastavro.types
from fastavro.repository.base import AbstractSchemaRepository
from fastavro.schema import fingerprint, load_schema, parse_schema, to_parsing_canonical_form

from millrace.schemas.errors import UnknownSchema

AVRO = Path(__file__).parent / "avro"
HISTORY = Path(__file__).parent / "history"
NAMESPACE = "millrace"
AvroType: TypeAlias = "str | AvroSchema | list[AvroType]"
"""a type by its name, or written out, or a union"""


class AvroField(TypedDict):
    """One field of a record; `default` may be null, so its absence says more than None."""

    name: str
    type: AvroType
    doc: str
    default: NotRequired[object]


AvroSchema = TypedDict(
    "AvroSchema",
    {
        "type": str,
        "name": str,
        "doc": str,
        "fields": list[AvroField],
        "symbols": list[str],
        "items": AvroType,
        "values": AvroType,
        "__named_schemas": "Mapping[str, AvroSchema]",
    },
    total=False,
)
"""A type that is written out, with the keys of its kind; `parse_schema` adds the last to the outermost."""

BODIES = {
    "episode_started": "EpisodeStarted",
    "episode_ended": "EpisodeEnded",
    "model_call": "ModelCall",
    "tool_call": "ToolCall",
    "tool_result": "ToolResult",
    "observation": "Observation",
    "internal_state": "InternalState",
    "reward": "Reward",
    "user_feedback": "UserFeedback",
    "security_label": "SecurityLabels",
    "gap": "Gap",
}
"""event kind -> record name of its body"""


@dataclass(frozen=True, slots=True)
class Schema:
    """One version of one named record, parsed and expanded."""

    name: str
    fingerprint: bytes
    """8 bytes, CRC-64-AVRO of the canonical form, little-endian as single-object encoding wants it"""
    definition: AvroSchema
    avro: fastavro.types.Schema
    """`definition`, as fastavro has it typed"""


class _Files(AbstractSchemaRepository):
    """Finds `millrace.Name` in `avro/Name.avsc`."""

    def load(self, name: str) -> AvroSchema:
        schema: AvroSchema = json.loads((AVRO / f"{name.removeprefix(NAMESPACE + '.')}.avsc").read_text())
        return schema


def _schema(name: str, avro: fastavro.types.Schema) -> Schema:
    assert isinstance(avro, dict), "a record's schema is a JSON object"
    definition = cast(AvroSchema, avro)
    return Schema(name, fingerprint_of(definition), definition, avro)


def fingerprint_of(definition: AvroSchema) -> bytes:
    """The 8 bytes that stand for a schema in single-object encoding."""
    return bytes.fromhex(fingerprint(to_parsing_canonical_form(cast(fastavro.types.Schema, definition)), "CRC-64-AVRO"))


@cache
def names() -> tuple[str, ...]:
    """Names of all current record types (enums left out), sorted."""
    kinds = ((path.stem, json.loads(path.read_text())["type"]) for path in sorted(AVRO.glob("*.avsc")))
    return tuple(name for name, kind in kinds if kind == "record")


@cache
def current(name: str) -> Schema:
    """Today's schema of a record. Raises UnknownSchema when there is no such record."""
    if not (AVRO / f"{name}.avsc").exists():
        raise UnknownSchema(f"there is no record named {name!r} in schemas/avro")
    return _schema(name, load_schema(f"{NAMESPACE}.{name}", repo=_Files()))


@cache
def _past() -> dict[bytes, Schema]:
    schemas = {}
    for path in HISTORY.glob("*/*.avsc"):
        schema = _schema(path.parent.name, parse_schema(json.loads(path.read_text())))
        schemas[schema.fingerprint] = schema
    return schemas


@cache
def by_fingerprint(data: bytes) -> Schema:
    """The schema, present or past, behind 8 bytes of fingerprint. Raises UnknownSchema."""
    for name in names():
        if current(name).fingerprint == data:
            return current(name)
    if data in _past():
        return _past()[data]
    raise UnknownSchema(f"no schema has the fingerprint {data.hex()}: written by a newer release, or not by Millrace")
