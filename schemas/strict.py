"""Refuses records with a key that their schema does not have: fastavro would drop it, and what it holds, in silence.

Invariant: a check raises UnknownKey for an unknown key at any depth of a record, and for nothing else; what lies where
a record belongs and is none is fastavro's to refuse, or makes a check raise a TypeError or AttributeError.

A check runs for every record that is written. So it is made once for each schema, looks only where a record can lie,
and asks each record one question in C."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from millrace.schemas.errors import UnknownKey
from millrace.schemas.registry import NAMESPACE, AvroSchema, AvroType

Check = Callable[[Any], None]
SHOWN = 80
"""characters of an unknown key that an error quotes"""


@dataclass(frozen=True, slots=True)
class _Inside:
    """Where records lie in a value."""

    check: Check
    fits: Callable[[Any], bool] | None
    """whether a value has known keys alone, where it is one record without others inside"""


def check_of(definition: AvroSchema) -> Check:
    """What raises UnknownKey for a record with a key that this expanded schema does not have."""
    return _record(definition, {}).check


def _record(schema: AvroSchema, by_name: dict[str, _Inside]) -> _Inside:
    name = str(schema["name"]).removeprefix(f"{NAMESPACE}.")
    keys = frozenset(field["name"] for field in schema["fields"])
    fits = keys.issuperset
    places = ((field["name"], _inside(field["type"], by_name)) for field in schema["fields"])
    inner = [(field, inside.fits, inside.check) for field, inside in places if inside is not None]

    def check(record: Any) -> None:
        if not fits(record):
            if isinstance(record, Mapping):
                raise _unknown(name, record.keys() - keys, keys)
            return
        for field, fit, inside in inner:
            value = record.get(field)
            if value is not None and (fit is None or not fit(value)):
                inside(value)

    entry = by_name[str(schema["name"])] = _Inside(check, None if inner else fits)
    return entry


def _inside(kind: AvroType, by_name: dict[str, _Inside]) -> _Inside | None:
    """Where records lie in a value of a type; None where none can."""
    if isinstance(kind, list):
        return next((inside for inside in (_inside(member, by_name) for member in kind) if inside is not None), None)
    if isinstance(kind, str):
        return by_name.get(kind)
    match kind["type"]:
        case "record":
            return _record(kind, by_name)
        case "array":
            return _for_parts(_inside(kind["items"], by_name), iter)
        case "map":
            return _for_parts(_inside(kind["values"], by_name), lambda table: iter(table.values()))
        case _:
            return None


def _for_parts(inside: _Inside | None, parts: Callable[[Any], Iterator[object]]) -> _Inside | None:
    if inside is None:
        return None
    check, fits = inside.check, inside.fits

    def check_parts(values: object) -> None:
        if fits is None or not all(map(fits, parts(values))):
            for value in parts(values):
                check(value)

    return _Inside(check_parts, None)


def _unknown(name: str, extra: Collection[object], keys: Collection[str]) -> UnknownKey:
    """The error for the first of the keys that are too many."""
    key = min(map(str, extra))[:SHOWN]
    nearest = get_close_matches(key, sorted(keys), n=1, cutoff=0.0)
    hint = f": did you mean {nearest[0]!r}?" if nearest else ""
    return UnknownKey(f"a {name} has no key {key!r}{hint}")
