"""Any change of any field of any record of a whole history, and any record left out, doubled, exchanged or moved.

Invariants: a seed is one change; what is altered is chosen evenly over records, then over the fields of one (those of
an event's body, of lists and of arrays included); the new value fits the schema and differs from the old one. Some
changes of chained records link the chain anew, as someone would who can write."""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from millrace.infra.log.base import Place, Record
from millrace.infra.log.history.ledger import chain_entry
from millrace.infra.stages.decisions import id_of
from millrace.schemas import codec
from millrace.schemas.arrays import pack, unpack
from millrace.schemas.chain import START, event_hash
from millrace.schemas.registry import current
from tests.support.whole import KINDS, Whole

Path = tuple[str | int, ...]
LINKED = ("ledger", "events", "decisions")
"""kinds of topic whose records hold digests of what they say"""
ALTER = 0.92
"""share of the changes that alter a field"""


@dataclass(frozen=True)
class Change:
    """What was done: `what` is `alter`, `drop`, `double`, `exchange` or `move`; `field` is record.field.subfield."""

    what: str
    kind: str
    field: str
    place: Place
    relinked: bool

    @property
    def listed(self) -> str:
        """How the page of the audit names this kind of change: the field, or what was done to a record of a topic."""
        return self.field if self.what == "alter" else f"{self.what} {self.kind}"

    def __str__(self) -> str:
        return f"{self.what} {self.kind} {self.field}{' (relinked)' if self.relinked else ''} at {tuple(self.place)}"


class Generator:
    """Changes of one history. `records` may choose other kinds of topic, to look closely at some."""

    def __init__(self, whole: Whole, kinds: tuple[str, ...] = KINDS) -> None:
        self._whole = whole
        self._records = [(kind, record) for kind in kinds for record in whole.records(kind)]

    def change(self, seed: int) -> tuple[Whole, Change]:
        """A changed copy of the history, and what was changed."""
        rng = random.Random(seed)
        broken = self._whole.copy()
        while True:
            kind, record = rng.choice(self._records)
            what = "alter" if rng.random() < ALTER else rng.choice(("drop", "double", "exchange", "move"))
            field = getattr(self, f"_{what}")(broken, rng, kind, record)
            if field is None:
                continue
            relinked = kind in LINKED and rng.random() < 0.5
            if relinked:
                relink(broken, kind)
                if self._same(broken, kind):
                    broken = self._whole.copy()
                    continue
            return broken, Change(what, kind, field, record.place, relinked)

    def _same(self, h: Whole, kind: str) -> bool:
        """Whether linking anew undid the change."""
        return [(r.place, r.value) for r in h.records(kind)] == [(r.place, r.value) for r in self._whole.records(kind)]

    def alteration(self, field: str, seed: int) -> tuple[Whole, Change] | None:
        """A changed copy whose change is of one kind of field, as `Change.listed` names it; None where this seed finds
        no other value, or the history holds no such field."""
        rng, broken = random.Random(seed), self._whole.copy()
        holding = [found for found in self._records if self._has(found[1], field)]
        if not holding:
            return None
        kind, record = rng.choice(holding)
        if field.endswith(".key"):
            found: str | None = _beside(broken, rng, record, "")
        elif ".header." in field:
            found = _beside(broken, rng, record, field.rpartition(".")[2])
        else:
            found = self._alter_value(broken, rng, record, field)
        if found is None:
            return None
        relinked = kind in LINKED
        if relinked:
            relink(broken, kind)
            if self._same(broken, kind):
                return None
        return broken, Change("alter", kind, found, record.place, relinked)

    def deed(self, what: str, kind: str, seed: int) -> tuple[Whole, Change] | None:
        """A changed copy in which a record of a kind of topic was dropped, doubled, exchanged or moved."""
        rng, broken = random.Random(seed), self._whole.copy()
        record = rng.choice([record for of, record in self._records if of == kind])
        name = getattr(self, f"_{what}")(broken, rng, kind, record)
        return None if name is None else (broken, Change(what, kind, name, record.place, relinked=False))

    def _has(self, record: Record, field: str) -> bool:
        name, rest = field.partition(".")[::2]
        if _name(record) != name:
            return False
        if rest == "key" or rest.startswith("header."):
            return rest == "key" or rest.removeprefix("header.") in record.headers
        return name == "bytes" or any(shown == field for shown, *_ in _Opened(record).fields())

    def _alter(self, h: Whole, rng: random.Random, kind: str, record: Record) -> str | None:
        if rng.random() < 0.05:
            return _beside(h, rng, record, rng.choice(["", *record.headers]))
        return self._alter_value(h, rng, record)

    def _alter_value(self, h: Whole, rng: random.Random, record: Record, only: str | None = None) -> str | None:
        value = record.value or b""
        if value[:2] != codec.MARK:
            _put(h, record, replace(record, value=bytes([value[0] ^ 1]) + value[1:]))
            return "bytes"
        opened = _Opened(record)
        shown, path, schema = rng.choice([found for found in opened.fields() if only in (None, found[0])])
        changed = opened.changed(path, schema, rng)
        if changed is None or changed == value:
            return None
        _put(h, record, replace(record, value=changed))
        return shown

    def _drop(self, h: Whole, rng: random.Random, kind: str, record: Record) -> str:
        _put(h, record, None)
        return _name(record)

    def _double(self, h: Whole, rng: random.Random, kind: str, record: Record) -> str:
        entries = h.bus.logs[record.topic][record.partition].entries
        entries.append(replace(record, offset=len(entries)))
        return _name(record)

    def _exchange(self, h: Whole, rng: random.Random, kind: str, record: Record) -> str | None:
        other = rng.choice(list(h.bus.read(record.topic, record.partition)))
        if (other.value, other.key, other.headers) == (record.value, record.key, record.headers):
            return None
        _put(h, record, replace(other, offset=record.offset))
        _put(h, other, replace(record, offset=other.offset))
        return _name(record)

    def _move(self, h: Whole, rng: random.Random, kind: str, record: Record) -> str | None:
        others = [p for p in range(h.bus.partitions(record.topic)) if p != record.partition]
        if not others:
            return None
        target = rng.choice(others)
        entries = h.bus.logs[record.topic][target].entries
        holes = [n for n, entry in enumerate(entries) if entry is None]
        offset = rng.choice(holes) if holes and rng.random() < 0.5 else len(entries)
        moved = replace(record, partition=target, offset=offset)
        if offset == len(entries):
            entries.append(moved)
        else:
            entries[offset] = moved
        _put(h, record, None)
        return _name(record)


class _Opened:
    """A record decoded, its body too."""

    def __init__(self, record: Record) -> None:
        self._name, decoded = codec.decode(record.value or b"")
        self._value: dict[str, Any] = copy.deepcopy(dict(decoded))
        self._body: Any = None
        if self._name == "Event":
            self._body = codec.decode_body(self._value["kind"], self._value["body"])

    def fields(self) -> list[tuple[str, Path, Any]]:
        """(name, path, schema) of everything that can be changed by itself."""
        paths = list(leaves(_schema(self._name), self._value))
        if self._body is not None:
            inside = leaves(_schema(codec.BODIES[self._value["kind"]]), self._body)
            paths = [(path, kind) for path, kind in paths if path != ("body",)]
            paths += [(("body", *path), kind) for path, kind in inside]
        return [(self._shown(path), path, schema) for path, schema in paths]

    def changed(self, path: Path, schema: Any, rng: random.Random) -> bytes | None:
        """The record with another value under a path; None where none was found."""
        inside = self._inside(path)
        if not _set(self._body if inside else self._value, path[1:] if inside else path, schema, rng):
            return None
        if inside:
            self._value["body"] = codec.encode_body(self._value["kind"], self._body)
        return codec.encode(self._name, self._value)

    def lengthened(self, more: str) -> bytes:
        """The record with `more` behind every string of its own and of its body."""
        for _, path, schema in self.fields():
            inside = self._inside(path)
            *way, last = path[1:] if inside else path
            holder = self._body if inside else self._value
            for part in way:
                holder = holder[part]
            if isinstance(holder[last], str) and "string" in (schema, *(schema if isinstance(schema, list) else ())):
                holder[last] += more
        if self._body is not None:
            self._value["body"] = codec.encode_body(self._value["kind"], self._body)
        return codec.encode(self._name, self._value)

    def _inside(self, path: Path) -> bool:
        return self._body is not None and path[0] == "body"

    def _shown(self, path: Path) -> str:
        parts = [f"body[{self._value['kind']}]", *path[1:]] if self._inside(path) else path
        return ".".join([self._name, *(str(part) for part in parts if not isinstance(part, int))])


def altered_strings(record: Record, more: str) -> bytes | None:
    """The value of a record with `more` behind every string in it; None where it has no value."""
    value = record.value
    return value if value is None or value[:2] != codec.MARK else _Opened(record).lengthened(more)


def relink(h: Whole, kind: str) -> None:
    """Give every ledger entry, or every event of each slot, the hashes of what now lies before it; every decision the
    id that follows from it."""
    prev: dict[int, bytes] = defaultdict(lambda: START)
    for record, row in h.rows(kind):
        if kind == "decisions":
            named = row | {"id": id_of(row)}  # type: ignore[arg-type]
            _put(h, record, replace(record, value=codec.encode("Decision", named)))
            continue
        before = prev[record.partition]
        linked = dict(chain_entry(row, before)) if kind == "ledger" else row | {"prev_hash": before}  # type: ignore[arg-type]
        if kind == "events":
            linked["hash"] = event_hash(before, linked)
        prev[record.partition] = linked["hash"]
        _put(h, record, replace(record, value=codec.encode(codec.name_of(record.value or b""), linked)))


def _beside(h: Whole, rng: random.Random, record: Record, name: str) -> str | None:
    """A header instead of a field, or, without a name, the key."""
    if not name:
        _put(h, record, replace(record, key=record.key + b"?"))
        return f"{_name(record)}.key"
    headers = dict(record.headers)
    headers[name] = headers[name] + b"1"
    _put(h, record, replace(record, headers=headers))
    return f"{_name(record)}.header.{name}"


def _name(record: Record) -> str:
    value = record.value or b""
    return codec.name_of(value) if value[:2] == codec.MARK else "bytes"


def _put(h: Whole, at: Record, record: Record | None) -> None:
    h.bus.logs[at.topic][at.partition].entries[at.offset] = record


# -- fields


@cache
def _schema(name: str) -> Any:
    return current(name).definition


def leaves(schema: Any, value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, schema) of everything in a record that can be changed by itself."""
    schema = _plain(schema)
    kind = schema["type"] if isinstance(schema, dict) else schema
    if isinstance(schema, list):
        yield path, schema
        if isinstance(value, dict):
            for option in schema:
                if _plain(option) != "null":
                    yield from ((p, s) for p, s in leaves(option, value, path) if p != path)
    elif kind == "record" and schema["name"] == "millrace.Array":
        yield path, "Array"
    elif kind == "record":
        for field in schema["fields"]:
            yield from leaves(field["type"], value[field["name"]], (*path, field["name"]))
    elif kind == "array":
        yield path, schema
        for n, item in enumerate(value):
            yield from leaves(schema["items"], item, (*path, n))
    elif kind == "map":
        yield path, schema
        for key, item in value.items():
            yield from leaves(schema["values"], item, (*path, key))
    else:
        yield path, schema


def _plain(schema: Any) -> Any:
    """A named type as its definition."""
    if isinstance(schema, str) and "." in schema:
        return _schema(schema.rpartition(".")[2])
    if isinstance(schema, dict) and isinstance(schema["type"], dict | list):
        return _plain(schema["type"])
    return schema


def _set(root: Any, path: Path, schema: Any, rng: random.Random) -> bool:
    """Put another value of the same type under a path; False where none was found."""
    holder = root
    for part in path[:-1]:
        holder = holder[part]
    old = holder[path[-1]]
    new = _other(old, schema, rng)
    if new is None and old is None:
        return False
    holder[path[-1]] = new
    return True


def _other(old: Any, schema: Any, rng: random.Random) -> Any:
    """A value of the type that differs from `old`."""
    schema = _plain(schema)
    if isinstance(schema, str) and schema == "Array":
        return _array(old, rng)
    if isinstance(schema, list):
        options = [option for option in schema if _plain(option) != "null"]
        if old is None:
            return _fresh(options[0], rng)
        return None if rng.random() < 0.3 else _other(old, options[0], rng)
    kind = schema["type"] if isinstance(schema, dict) else schema
    if kind == "record":
        name = rng.choice(list(old))
        types = {field["name"]: field["type"] for field in schema["fields"]}
        return old | {name: _other(old[name], types[name], rng)}
    if kind == "enum":
        return rng.choice([symbol for symbol in schema["symbols"] if symbol != old])
    if kind == "array":
        return _list(old, schema["items"], rng)
    if kind == "map":
        if old and rng.random() < 0.5:
            gone = rng.choice(list(old))
            return {key: value for key, value in old.items() if key != gone}
        return old | {f"extra-{rng.randrange(1000)}": _fresh(schema["values"], rng)}
    return _SCALARS[kind](old, rng)


def _list(old: list[Any], items: Any, rng: random.Random) -> list[Any]:
    if len(old) > 1 and rng.random() < 0.3 and old[0] != old[-1]:
        return [old[-1], *old[1:-1], old[0]]
    if old and rng.random() < 0.5:
        at = rng.randrange(len(old))
        return old[:at] + old[at + 1 :]
    return [*old, old[-1] if old and rng.random() < 0.5 else _fresh(items, rng)]


def _array(old: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    values = unpack(old).copy()
    if not len(values) or rng.random() < 0.2:
        return dict(pack(np.append(values, values.dtype.type(1))))
    at = rng.randrange(len(values))
    if rng.random() < 0.2:
        return dict(pack(np.delete(values, at)))
    values[at] = 1 - values[at] if values.dtype == np.uint8 else values[at] + values.dtype.type(1)
    return dict(pack(values))


def _whole_number(old: int, rng: random.Random) -> int:
    return rng.choice([old + 1, old - 1, old + rng.randrange(2, 100), 0 if old else 7])


def _number(old: float, rng: random.Random) -> float:
    if math.isnan(old):
        return 0.5
    return rng.choice([old + 0.25, old * 2 + 1, -old - 1])


def _text(old: str, rng: random.Random) -> str:
    if old.isdigit():
        return str(int(old) + 1)
    return rng.choice([old + "x", old[:-1] if old else "y", "another"])


_SCALARS: dict[str, Callable[[Any, random.Random], Any]] = {
    "int": _whole_number,
    "long": _whole_number,
    "double": _number,
    "float": _number,
    "boolean": lambda old, _: not old,
    "string": _text,
    "bytes": lambda old, _: bytes([old[0] ^ 1]) + old[1:] if old else b"\x01",
}


def _fresh(schema: Any, rng: random.Random) -> Any:
    """Some value of a type."""
    schema = _plain(schema)
    if isinstance(schema, list):
        return _fresh(next(option for option in schema if _plain(option) != "null"), rng)
    kind = schema["type"] if isinstance(schema, dict) else schema
    match kind:
        case "record" if schema["name"] == "millrace.Array":
            return pack(np.array([1], np.int32))
        case "record":
            return {field["name"]: _fresh(field["type"], rng) for field in schema["fields"]}
        case "enum":
            return schema["symbols"][0]
        case "array":
            return []
        case "map":
            return {}
        case _:
            blank = {"int": 3, "long": 3, "double": 0.5, "float": 0.5, "boolean": True, "string": "z", "bytes": b"z"}
            return blank[kind]
