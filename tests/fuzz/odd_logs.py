"""Real histories with something odd in them: records damaged, replaced, doubled, exchanged, taken out, added.

Invariants: everything comes from the `random.Random` that is given, so that a seed names an input; the history that is
given is never changed; what was done is said, place by place. Places, headers and keys stay what a broker can hold."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any, NamedTuple

from millrace.infra.log.base import Place, Record
from millrace.infra.log.history.kinds import HOLDS, topics_of
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import bounds, codec
from millrace.schemas.registry import NAMESPACE, current
from tests.support import odd_json

LONG = 2**63 - 1
INT = 2**31 - 1
NUMBERS = (0, 1, -1, 2, 3, 7, 63, 64, 255, 1000, INT, -INT - 1)
LONGS = (
    *NUMBERS,
    INT + 1,
    2**53 + 1,
    LONG,
    -LONG - 1,
    bounds.VERSION,
    bounds.VERSION + 1,
    10**15,
    253402300800 * 10**6,
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e30, -1e308, 1.7e308, float("nan"), float("inf"), float("-inf"), 5e-324)
TEXTS = (
    "", " ", "x", "{}", "null", "0", "7", "p", "pico", "local", "local/g", "~slot", "a/b/c", "../../x", "/etc/passwd",
    "file:///etc/passwd", "s3://nowhere/x", "memory://x", "http://[", "file://[::1", "v7", "p@3", "w.raw",
    "test.events",
    "\x00", "\x1b[2J\x07\r\n", "\u202e\U0001f600", "\uffff", "\u2028", "[bold]x[/]", "[/]", "[red", "</script><b>",
    "é" * 70, "x" * (bounds.NAME_BYTES + 1), "y" * 70_000, "[" * 600 + "]" * 600, '{"a":' * 200 + "1" + "}" * 200,
    "9" * 5000, '"\\ud800"', '{"a": 1e999, "b": 123456789012345678901234567890}', "NaN", "-Infinity", "1e400",
    "sha256:" + "0" * 64, "0" * 64, "ready", "setting", "train", "\\", "'", "%s%n", "{0}", "$(x)", "2026-01-01",
)  # fmt: skip
BYTES = (
    b"", b"\x00", b"{", b"[]", b"null", b"\xff\xfe", b"\xc3\x01", b"\xc3\x01short", b"[" * 600, b'{"messages":[]}',
    b'{"messages":null,"choices":{}}', b"\x01\x02\x03\x04" * 3, b"\x00" * 32, b"\xff" * 33, b'"\\ud800"',
    b'{"messages":[{"role":"user","content":"\\ud800"}],"choices":[{"message":{"role":"assistant","content":1}}]}',
)  # fmt: skip
KEYS = (b"", b"p", b"pico", b"0", b"7", b"local/g", b"/", b"\xff", b"\x00", b"progress/0", b"progress/x", b"k" * 2000)
HEADERS = (
    "id", "trajectory", "policy", "seq", "kind", "group", "source", "source-seq", "turn", "stage", "claim", "time",
    "", "x" * 300,
)  # fmt: skip
HEADER_VALUES = (
    b"", b"0", b"7", b"-1", b"ready", b"setting", b"p", b"pico", b"\xff\xfe", b"\x00", b"9" * 30, b"\xb2", b"1e5",
    b" 7 ",
    "٣".encode(), b"x" * 3000,
)  # fmt: skip


class Damage(NamedTuple):
    """What was done to which record, in words."""

    what: str
    place: Place

    def __str__(self) -> str:
        return f"{self.what} at {self.place.topic}/{self.place.partition}@{self.place.offset}"


@dataclass(frozen=True)
class OddLog:
    """A damaged copy of a history."""

    bus: MemoryBus
    done: tuple[Damage, ...]

    @property
    def places(self) -> frozenset[Place]:
        return frozenset(one.place for one in self.done)


class OddLogs:
    """Makes damaged copies of one history. kinds: of topics that are damaged; by default every one that is there."""

    def __init__(self, bus: MemoryBus, namespace: str, policy: str, kinds: Sequence[str] = ()) -> None:
        self._bus = bus
        names = topics_of(namespace, policy)
        self._topics = {kind: names[kind] for kind in (kinds or sorted(HOLDS)) if names[kind] in bus.logs}
        self._records = {kind: list(_records(bus, topic)) for kind, topic in self._topics.items()}
        self._all = [record for records in self._records.values() for record in records]

    def odd(self, r: Random, most: int = 4, deeds: Sequence[str] = ()) -> OddLog:
        """A copy in which up to `most` things were done."""
        bus = copied(self._bus)
        done: list[Damage] = []
        for _ in range(r.randint(1, most)):
            deed = r.choice(deeds or tuple(DEEDS))
            kind = r.choice(list(self._topics))
            done += DEEDS[deed](self, bus, r, kind)
        return OddLog(bus, tuple(done))

    def beside(self, r: Random, most: int = 4) -> OddLog:
        """A copy to which up to `most` records were added that nobody can read; nothing that was there is touched."""
        bus = copied(self._bus)
        done: list[Damage] = []
        for _ in range(r.randint(1, most)):
            kind = r.choice(list(self._topics))
            like = self.some(r, kind) or self.any(r)
            value = r.choice((b"", b"\xc3\x01torn", r.randbytes(40), (like.value or b"")[: codec.HEAD + 3]))
            topic = self.topic(kind)
            made = replace(like, value=value, headers={}, key=r.choice(KEYS))
            partition = r.randrange(bus.partitions(topic))
            entries = bus.logs[topic][partition].entries
            entries.append(replace(made, topic=topic, partition=partition, offset=len(entries)))
            done.append(Damage(f"{kind}: bytes beside", Place(topic, partition, len(entries) - 1)))
        return OddLog(bus, tuple(done))

    def some(self, r: Random, kind: str) -> Record | None:
        """A record of a kind of topic as it was."""
        return r.choice(self._records[kind]) if self._records[kind] else None

    def any(self, r: Random) -> Record:
        """A record of any topic as it was."""
        return r.choice(self._all)

    def topic(self, kind: str) -> str:
        """The full name of a kind's topic."""
        return self._topics[kind]


def copied(bus: MemoryBus) -> MemoryBus:
    """The same logs to break; records are shared."""
    other = MemoryBus({name: len(logs) for name, logs in bus.logs.items()}, clock=bus.clock)
    other.specs = dict(bus.specs)
    for name, logs in bus.logs.items():
        for log, mine in zip(other.logs[name], logs, strict=True):
            log.entries, log.start = list(mine.entries), mine.start
    return other


def _records(bus: MemoryBus, topic: str) -> Iterator[Record]:
    for partition in range(bus.partitions(topic)):
        yield from bus.read(topic, partition)


def _put(bus: MemoryBus, at: Place, record: Record | None) -> None:
    bus.logs[at.topic][at.partition].entries[at.offset] = record


def _added(bus: MemoryBus, r: Random, topic: str, record: Record) -> Place:
    """The record once more: at the end of a partition, or in a hole of it."""
    partition = r.randrange(bus.partitions(topic))
    entries = bus.logs[topic][partition].entries
    holes = [at for at, entry in enumerate(entries) if entry is None]
    at = r.choice(holes) if holes and r.random() < 0.5 else len(entries)
    made = replace(record, topic=topic, partition=partition, offset=at)
    if at == len(entries):
        entries.append(made)
    else:
        entries[at] = made
    return made.place


# -- what is done


def _bytes(logs: OddLogs, bus: MemoryBus, r: Random, kind: str) -> list[Damage]:
    """The bytes of a record are others."""
    record = logs.some(r, kind)
    if record is None:
        return []
    what, value = torn(r, record.value or b"", logs.any(r).value)
    _put(bus, record.place, replace(record, value=value))
    return [Damage(f"{kind}: {what}", record.place)]


def torn(r: Random, value: bytes, other: bytes | None) -> tuple[str, bytes | None]:
    """Bytes that are no record any more, or one of another kind."""
    match r.randrange(10):
        case 0:
            return "a tombstone", None
        case 1:
            return "no bytes", b""
        case 2:
            return "cut short", value[: r.randrange(len(value) + 1)]
        case 3:
            return "bytes follow", value + r.randbytes(r.choice((1, 2, 9, 100)))
        case 4:
            return "noise", r.randbytes(r.choice((1, 9, 10, 11, 60, 3000)))
        case 5:
            return "noise behind its head", value[: codec.HEAD] + r.randbytes(r.choice((1, 20, 300)))
        case 6:
            return "another schema's head", r.choice(_heads()) + value[codec.HEAD :]
        case 7:
            return "another record's bytes", other
        case 8:
            return "an unknown schema", codec.MARK + r.randbytes(8) + value[codec.HEAD :]
        case _:
            if not value:
                return "no bytes", b""
            found = bytearray(value)
            for _ in range(r.choice((1, 1, 1, 3, 20))):
                found[r.randrange(min(len(found), codec.HEAD), len(found)) if len(found) > codec.HEAD else 0] = (
                    r.randrange(256)
                )
            return "bytes altered", bytes(found)


@cache
def _heads() -> tuple[bytes, ...]:
    names = {name for names in HOLDS.values() for name in names} | set(codec.BODIES.values()) | {"Claim"}
    found = []
    for name in sorted(names):
        try:
            found.append(codec.MARK + current(name).fingerprint)
        except Exception:
            continue
    return tuple(found)


def _fields(logs: OddLogs, bus: MemoryBus, r: Random, kind: str) -> list[Damage]:
    """Some fields of a record hold odd values of their types."""
    record = logs.some(r, kind)
    if record is None:
        return []
    found = altered(r, record.value)
    if found is None:
        return []
    names, value = found
    _put(bus, record.place, replace(record, value=value))
    return [Damage(f"{kind}: odd {', '.join(names)}", record.place)]


def altered(r: Random, value: bytes | None) -> tuple[list[str], bytes] | None:
    """A record with odd values in it, and where; None for bytes that are none."""
    try:
        name, record = codec.decode(value or b"")
    except Exception:
        return None
    record = copy.deepcopy(dict(record))
    body: dict[str, Any] | None = None
    if name == "Event":
        try:
            body = copy.deepcopy(codec.decode_body(record["kind"], record["body"]))
        except Exception:
            body = None
    names: list[str] = []
    kind = record["kind"] if body is not None else ""
    for _ in range(r.choice((1, 1, 1, 2, 3, 8))):
        if body is not None and r.random() < 0.5:
            names.append(f"body.{_one(r, codec.BODIES[kind], body)}")
        else:
            names.append(_one(r, name, record))
    if body is not None and "body" not in names:
        record["body"] = codec.encode_body(kind, body)
    return names, codec.encode_by_name(name, record)


def _one(r: Random, name: str, record: dict[str, Any]) -> str:
    """Alter one field, or something within it; gives its name."""
    schema = {field["name"]: field["type"] for field in current(name).definition["fields"]}
    field = r.choice(sorted(schema))
    record[field] = _within(r, schema[field], record[field], field)
    return field


def _within(r: Random, schema: Any, old: Any, name: str) -> Any:
    """Something odd in place of a value, or somewhere within it."""
    kind = _plain(schema)
    if isinstance(kind, list):
        options = [one for one in kind if one != "null"]
        if old is None:
            return _value(r, r.choice(options), name)
        if r.random() < 0.2 and "null" in kind:
            return None
        return _within(r, options[0], old, name)
    if isinstance(kind, dict) and r.random() < 0.7 and old:
        match kind["type"]:
            case "record":
                field = r.choice(kind["fields"])
                return {**old, field["name"]: _within(r, field["type"], old[field["name"]], field["name"])}
            case "array":
                at = r.randrange(len(old))
                match r.randrange(5):
                    case 0:
                        return old[:at] + old[at + 1 :]
                    case 1:
                        return old + old[at : at + 1] * r.choice((1, 2, 300))
                    case 2:
                        return old[::-1]
                    case _:
                        return [*old[:at], _within(r, kind["items"], old[at], name), *old[at + 1 :]]
            case "map":
                key = r.choice(sorted(old))
                return {**old, key: _within(r, kind["values"], old[key], name)}
    if isinstance(old, bytes) and old[:1] in (b"{", b"[") and r.random() < 0.8:
        return _json(r, old)
    if isinstance(old, str) and old[:1] in ("{", "[") and r.random() < 0.6:
        return _json(r, old.encode()).decode("utf-8", "replace")
    if isinstance(old, int) and not isinstance(old, bool) and r.random() < 0.3:
        low = -(2**31) if kind == "int" else -LONG - 1
        return max(low, min(-low - 1, old + r.choice((-1, 1, -1000, 1000, 10**6, -(10**6)))))
    return _value(r, schema, name)


def _json(r: Random, old: bytes) -> bytes:
    """JSON with something odd in it."""
    try:
        found = json.loads(old)
        for _ in range(r.choice((1, 1, 2))):
            found = odd_json.changed(r, found)
        return odd_json.text(found).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):  # odd already, or deep
        return r.choice(BYTES)


def _value(r: Random, schema: Any, name: str) -> Any:
    """An odd value of a type."""
    kind = _plain(schema)
    if isinstance(kind, list):
        return _value(r, r.choice(kind), name)
    match kind if isinstance(kind, str) else kind["type"]:
        case "null":
            return None
        case "boolean":
            return r.random() < 0.5
        case "int":
            return r.choice(NUMBERS)
        case "long":
            return r.choice(LONGS)
        case "float" | "double":
            return r.choice(FLOATS)
        case "string":
            return r.choice(TEXTS)
        case "bytes":
            if name == "body":
                kind = r.choice(sorted(codec.BODIES))
                return codec.encode_body(kind, _value(r, f"{NAMESPACE}.{codec.BODIES[kind]}", ""))
            return r.choice(BYTES)
        case "array":
            size = r.choice(
                (0, 0, 1, 2, 3, 5, 300 if isinstance(kind["items"], str) and "." not in kind["items"] else 3)
            )
            return [_value(r, kind["items"], name) for _ in range(size)]
        case "map":
            return {r.choice(TEXTS): _value(r, kind["values"], name) for _ in range(r.choice((0, 1, 3)))}
        case "enum":
            return r.choice(kind["symbols"])
        case "record" if kind["name"] == f"{NAMESPACE}.Array":
            return {
                "dtype": r.choice(("int32", "int64", "float32", "uint8", "", "object", "O", "int7", "<U9", "bool")),
                "data": r.choice(
                    (b"", b"\x01", b"\x00" * 4, b"\xff" * 12, b"\x00\x00\xc0\x7f" * 3, b"\x01\x00\x00\x00" * 300)
                ),
            }
        case "record":
            return {field["name"]: _value(r, field["type"], field["name"]) for field in kind["fields"]}
        case other:
            raise AssertionError(other)


def _plain(schema: Any) -> Any:
    """A named type as its definition."""
    if isinstance(schema, str) and schema.startswith(f"{NAMESPACE}."):
        return current(schema.removeprefix(f"{NAMESPACE}.")).definition
    if isinstance(schema, dict) and isinstance(schema["type"], dict | list):
        return _plain(schema["type"])
    return schema


def _wild(logs: OddLogs, bus: MemoryBus, r: Random, kind: str) -> list[Damage]:
    """A record of which everything is odd, in place of one or beside them."""
    name = r.choice(HOLDS[kind])
    made = _value(r, f"{NAMESPACE}.{name}", "")
    if name == "Event" and r.random() < 0.7:
        which = r.choice(sorted(codec.BODIES))
        made |= {"kind": which, "body": codec.encode_body(which, _value(r, f"{NAMESPACE}.{codec.BODIES[which]}", ""))}
    value = codec.encode_by_name(name, made)
    record = logs.some(r, kind)
    like = record or logs.any(r)
    if record is not None and r.random() < 0.5:
        _put(bus, record.place, replace(record, value=value))
        return [Damage(f"{kind}: all of it odd", record.place)]
    return [
        Damage(
            f"{kind}: an odd one more", _added(bus, r, logs.topic(kind), replace(like, value=value, key=r.choice(KEYS)))
        )
    ]


def _beside(logs: OddLogs, bus: MemoryBus, r: Random, kind: str) -> list[Damage]:
    """Key, headers or time of a record are odd."""
    record = logs.some(r, kind)
    if record is None:
        return []
    match r.randrange(5):
        case 0:
            made, what = replace(record, key=r.choice(KEYS)), "key"
        case 1:
            made, what = replace(record, headers={}), "no headers"
        case 2:
            made, what = replace(record, timestamp=r.choice((0, 1, -1, 2**62 // 1000 * 1000, 10**18))), "time"
        case _:
            names = [*record.headers, r.choice(HEADERS)]
            some = {r.choice(names): r.choice(HEADER_VALUES) for _ in range(r.choice((1, 1, 2)))}
            made, what = replace(record, headers={**record.headers, **some}), f"headers {sorted(some)}"
    _put(bus, record.place, made)
    return [Damage(f"{kind}: odd {what[:60]}", record.place)]


def _doubled(logs: OddLogs, bus: MemoryBus, r: Random, kind: str) -> list[Damage]:
    record = logs.some(r, kind)
    return [] if record is None else [Damage(f"{kind}: doubled", _added(bus, r, record.topic, record))]


def _exchanged(logs: OddLogs, bus: MemoryBus, r: Random, kind: str) -> list[Damage]:
    one, other = logs.some(r, kind), logs.some(r, kind)
    if one is None or other is None:
        return []
    _put(bus, one.place, replace(other, partition=one.partition, offset=one.offset))
    _put(bus, other.place, replace(one, partition=other.partition, offset=other.offset))
    return [Damage(f"{kind}: exchanged", one.place), Damage(f"{kind}: exchanged", other.place)]


def _gone(logs: OddLogs, bus: MemoryBus, r: Random, kind: str) -> list[Damage]:
    record = logs.some(r, kind)
    if record is None:
        return []
    _put(bus, record.place, None)
    return [Damage(f"{kind}: gone", record.place)]


def _foreign(logs: OddLogs, bus: MemoryBus, r: Random, kind: str) -> list[Damage]:
    """A record of another topic, as it lies there."""
    record = logs.any(r)
    return [Damage(f"{kind}: foreign", _added(bus, r, logs.topic(kind), record))]


DEEDS: Mapping[str, Callable[[OddLogs, MemoryBus, Random, str], list[Damage]]] = {
    "bytes": _bytes,
    "fields": _fields,
    "fields again": _fields,
    "fields once more": _fields,
    "wild": _wild,
    "beside": _beside,
    "doubled": _doubled,
    "exchanged": _exchanged,
    "gone": _gone,
    "foreign": _foreign,
}
