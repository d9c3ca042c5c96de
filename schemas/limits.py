"""Is what a record says within the bounds of `schemas.bounds`? One pure function for everything that enters a stage.

It is made from the schemas themselves: every string is a name unless `_RULES` calls it text, every number has the range
of its type, every list and map has at most `bounds.NAMES` entries. So a field that is added tomorrow is bounded too.

Invariant: what `beyond` passes fits every key, header, timer and state of a later stage, and no loop of one runs longer
than a bound says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from millrace.schemas import bounds, codec
from millrace.schemas.registry import NAMESPACE, AvroType, current

Check = Callable[[Any], int | float | None]
"""a value to the bound that it is beyond, None when it is within"""
FieldChecks = tuple[tuple[str, ...], tuple[tuple[str, Check], ...]]
"""fields of a record that are names, and others with their checks"""
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""what the name of a source has none of where it enters"""


def beyond(name: str, record: Mapping[str, object]) -> str | None:
    """Which field of a record called `name` is beyond its bound, in words without content; None when all are within."""
    first = _first(_fields(name), record)
    return None if first is None else f"{first[0]} of {name} is beyond its bound of {first[1]:,}"


def _first(fields: FieldChecks, record: Mapping[str, Any]) -> tuple[str, float] | None:
    """The first field that is beyond its bound, and the bound."""
    names, checks = fields
    for field in names:
        value = record.get(field)
        if value is not None and len(value) > _NAME_CHARACTERS and _name(value) is not None:
            return field, bounds.NAME_BYTES
    for field, check in checks:
        value = record.get(field)
        if value is not None and (bound := check(value)) is not None:
            return field, bound
    return None


def beyond_body(kind: str, body: Mapping[str, object]) -> str | None:
    """`beyond` of the body of an event of this kind."""
    return beyond(codec.BODIES[kind], body)


def _text(value: object) -> None:
    """Content: as long as its event may be."""


_NAME_CHARACTERS = bounds.NAME_BYTES // 4
"""A character has at most four bytes, so names of as many characters need not be encoded."""


def _name(value: str) -> int | None:
    return bounds.NAME_BYTES if len(value) > _NAME_CHARACTERS and _size(value) > bounds.NAME_BYTES else None


def _size(value: str) -> int:
    return len(value.encode("utf-8", "surrogatepass"))


def _between(low: int, high: int) -> Check:
    return lambda value: None if low <= value <= high else high


def _entries(of: Check, most: int) -> Check:
    def check(value: Mapping[str, object] | Sequence[object]) -> int | float | None:
        if len(value) > most:
            return most
        if isinstance(value, Mapping):
            for key in value:
                if _name(key) is not None:
                    return bounds.NAME_BYTES
        for part in value.values() if isinstance(value, Mapping) else value:
            if (bound := of(part)) is not None:
                return bound
        return None

    return check


def _reward(value: float) -> float | None:
    return None if math.isfinite(value) and abs(value) <= bounds.REWARD else bounds.REWARD


_INT = _between(-bounds.INT, bounds.INT)
_LONG = _between(-bounds.VERSION, bounds.VERSION)
_COUNTER = _between(0, bounds.VERSION)
_WAIT = _between(-bounds.WAIT_MS, bounds.WAIT_MS)
_GROUP = _between(0, bounds.GROUP_SIZE)
_SAMPLES = bounds.GROUP_SIZE
_OF_GROUP = {name: _entries(_INT, _SAMPLES) for name in ("samples", "missing", "tokens")}
_ANY = _text

_RULES: Mapping[str, Mapping[str, Check]] = {
    "Event": {"governance": _ANY, "body": _ANY, "source_place": _ANY},
    "EpisodeStarted": {"task": _text, "group_size": _GROUP, "reward_deadline_ms": _WAIT},
    "EpisodeEnded": dict.fromkeys(("task", "output", "reason", "stop_condition"), _text),
    "ModelCall": dict.fromkeys(("stop_condition", "request", "response"), _text),
    "Sampling": {"stop": _entries(_text, bounds.NAMES), "seed": _ANY},
    "ToolCall": {"arguments": _text},
    "ToolResult": {"content": _text},
    "Observation": dict.fromkeys(("content", "origin"), _text),
    "InternalState": dict.fromkeys(("summary", "plan_step"), _text),
    "Reward": dict.fromkeys(("label", "critique"), _text)
    | {"value": _reward, "components": _entries(_reward, bounds.NAMES)},
    "UserFeedback": dict.fromkeys(("label", "text"), _text),
    "Gap": {"reason": _text},
    "Prompt": {"task": _text, "number": _COUNTER, "group_size": _between(1, bounds.GROUP_SIZE)},
    "Completion": _OF_GROUP
    | {
        "size": _GROUP,
        "trajectories": _entries(_ANY, _SAMPLES),
        "rewards": _entries(_ANY, _SAMPLES),
        "reason": _text,
    },
    "WeightVersion": dict.fromkeys(("uri", "files", "broadcast", "selection"), _ANY)
    | {
        "version": _COUNTER,
        "batch": _between(1, bounds.BATCH),
        "eta": _between(0, bounds.ETA),
        "group_size": _between(1, bounds.GROUP_SIZE),
    },
    "LedgerEntry": dict.fromkeys(("groups", "ranks", "unchanged", "libraries", "metrics", "cpu", "config"), _ANY)
    | {"version": _COUNTER, "seq_hi": _COUNTER},
    "Evaluation": dict.fromkeys(("versions", "model", "tasks", "scores"), _ANY),
    "Grant": {"task": _text, "samples": _entries(_GROUP, _SAMPLES), "group_size": _GROUP, "reward_deadline_ms": _WAIT}
    | dict.fromkeys(("ticket", "round"), _COUNTER),
    "Resolution": {"tokens": _entries(_INT, _SAMPLES), "reason": _text, "setting": _ANY, "ticket": _COUNTER}
    | {"trajectories": _entries(_ANY, _SAMPLES), "rewards": _entries(_ANY, _SAMPLES), "seq": _COUNTER},
    "WorkerStatus": {"error": _text, "expires_at": _ANY, "time": _ANY},
    "Decision": dict.fromkeys(("value", "reason"), _text),
}
"""fields with another rule than their type's"""


@cache
def _fields(name: str) -> FieldChecks:
    """(the fields that are names, other fields and their checks) of a record, without those that always pass. Whether a
    field may be null is not asked here: the codec tells."""
    rules = _RULES.get(name, {})
    schema = current(name).definition
    checks = [(field["name"], _check(_non_null(field["type"]), rules.get(field["name"]))) for field in schema["fields"]]
    names = tuple(field for field, check in checks if check is _name)
    return names, tuple((field, check) for field, check in checks if check not in (_ANY, _name))


def _non_null(kind: AvroType) -> AvroType:
    """A type without null."""
    return next(one for one in kind if one != "null") if isinstance(kind, list) else kind


def _check(kind: AvroType, rule: Check | None) -> Check:
    if isinstance(kind, list):
        (inner,) = (_check(one, rule) for one in kind if one != "null")
        return inner if inner is _ANY else lambda value: None if value is None else inner(value)
    if rule is not None:
        return rule
    if isinstance(kind, str):
        kind = {"type": "record", "name": kind} if kind.startswith(NAMESPACE) else {"type": kind}
    match kind["type"]:
        case "string":
            return _name
        case "int":
            return _INT
        case "long":
            return _LONG
        case "array":
            return _entries(_check(kind["items"], None), bounds.NAMES)
        case "map":
            return _entries(_check(kind["values"], None), bounds.NAMES)
        case "record":
            return _record(kind["name"].removeprefix(f"{NAMESPACE}."))
        case _:
            return _ANY


def _record(name: str) -> Check:
    if current(name).definition["type"] != "record":
        return _ANY
    fields = _fields(name)
    return lambda record: None if (first := _first(fields, record)) is None else first[1]
