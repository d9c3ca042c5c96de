"""Refuses records with a key that their schema does not have: fastavro would drop it, and what it holds, in silence.

Invariant: a check raises UnknownKey for an unknown key at any depth of a record, and for nothing else; what lies where
a record belongs and is none is fastavro's to refuse, or makes a check raise a TypeError or AttributeError. The
functions of `binary` look for themselves: a check runs for what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from millrace.schemas.errors import UnknownKey
from millrace.schemas.registry import NAMESPACE, AvroSchema, AvroType

Check = Callable[[Any], None]
SHOWN = 80
"""characters of an unknown key that an error quotes"""


def check_of(parsed: AvroSchema) -> Check:
    """What raises UnknownKey for a record with a key that this expanded schema does not have."""
    return _record(parsed, {})


def _record(schema: AvroSchema, known: dict[str, Check]) -> Check:
    name = str(schema["name"]).removeprefix(f"{NAMESPACE}.")
    keys = frozenset(field["name"] for field in schema["fields"])
    places = ((field["name"], _inside(field["type"], known)) for field in schema["fields"])
    inner = [(field, inside) for field, inside in places if inside is not None]

    def check(record: Any) -> None:
        if not keys.issuperset(record):
            if isinstance(record, Mapping):
                raise _unknown(name, record.keys() - keys, keys)
            return
        for field, inside in inner:
            value = record.get(field)
            if value is not None:
                inside(value)

    known[str(schema["name"])] = check
    return check


def _inside(kind: AvroType, known: dict[str, Check]) -> Check | None:
    """The check of the records that lie in a value of a type; None where none can."""
    if isinstance(kind, list):
        return next((check for each in kind if (check := _inside(each, known)) is not None), None)
    if isinstance(kind, str):
        return known.get(kind)
    match kind["type"]:
        case "record":
            return _record(kind, known)
        case "array":
            return _each(_inside(kind["items"], known), iter)
        case "map":
            return _each(_inside(kind["values"], known), lambda table: table.values())
        case _:
            return None


def _each(check: Check | None, parts: Callable[[Any], Iterable[object]]) -> Check | None:
    if check is None:
        return None

    def each(values: object) -> None:
        for value in parts(values):
            check(value)

    return each


def _unknown(name: str, extra: Collection[object], known: Collection[str]) -> UnknownKey:
    """The error for the first of the keys that are too many."""
    key = min(map(str, extra))[:SHOWN]
    nearest = get_close_matches(key, sorted(known), n=1, cutoff=0.0)
    hint = f": did you mean {nearest[0]!r}?" if nearest else ""
    return UnknownKey(f"a {name} has no key {key!r}{hint}")
