"""Every string of an event, found by its schema: which hold text, and which are names.

A text is what somebody wrote: spans of it can be taken out. A name identifies something and has to stay comparable: it
is kept or replaced as a whole. A string field that is not listed as text is a name, so that a new field of a schema is
looked at without anybody thinking of it.

Invariants: strings come in the same order whenever the same record is walked; a path names fields and positions, never
content. What refine sets itself (`governance`, `source_place`) is no part of what came."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from millrace.schemas import codec
from millrace.schemas.records import Event
from millrace.schemas.registry import AvroSchema, AvroType, current

TEXTS: Mapping[str, tuple[str, ...]] = {
    "episode_started": ("task",),
    "episode_ended": ("output", "reason", "task", "stop_condition"),
    "model_call": ("request", "response", "stop_condition", "sampling"),
    "tool_call": ("arguments",),
    "tool_result": ("content",),
    "observation": ("content", "origin"),
    "internal_state": ("summary", "plan_step", "injected"),
    "reward": ("critique", "label", "failure"),
    "user_feedback": ("text", "label"),
    "security_label": (),
    "gap": ("reason",),
}
"""event kind -> fields of its body that hold text; those that hold JSON are looked into"""
ENVELOPE = "Event"
ARRAY = "millrace.Array"
"""Its one string is the type of its items, which is checked against the few that are stored."""
_REFINE_FIELDS = frozenset({"governance", "source_place"})

Step = str | int | tuple[str, int]
Path = tuple[Step, ...]
"""fields by name, items by number, and ("key", n) or ("value", n) for the n-th entry of a map"""
Shape: TypeAlias = "str | dict[str, Shape] | tuple[str, Shape | None]"
"""what of a schema may hold text: string, bytes, the fields of a record, ("array", items) or ("map", values)"""


class String(NamedTuple):
    """One string of a record, or the bytes of a field that hold text."""

    path: Path
    value: str | bytes
    text: bool


def strings_of(
    event: Event,
    body: Mapping[str, object] | None,
    headers: Mapping[str, str],
    skips: Container[str] = frozenset(),
) -> list[String]:
    """Names of an event without its body and of its headers, names and texts of its body; names that are `skips` are
    left out. The first step of a path says which of the three it is of: `event`, `headers` or `body`."""
    strings: list[String] = []
    _collect(strings, _fields(ENVELOPE, "event"), event, (), skips)
    strings += [String(("headers", name), value, False) for name, value in headers.items() if value not in skips]
    if body is not None:
        kind = event["kind"]
        _collect(strings, _fields(codec.BODIES[kind], "body"), body, TEXTS[kind], skips)
    return strings


def texts_of(kind: str, body: Mapping[str, object]) -> list[String]:
    """The texts of a body, under paths inside of it."""
    strings: list[String] = []
    _collect(strings, _fields(codec.BODIES[kind], "body"), body, TEXTS[kind], frozenset())
    return [string._replace(path=string.path[1:]) for string in strings if string.text]


def _collect(
    strings: list[String],
    fields: Sequence[tuple[str, Shape, Path]],
    record: Mapping[str, Any],
    texts: Sequence[str],
    skips: Container[str],
) -> None:
    for name, shape, path in fields:
        value = record[name]
        if value is None:
            continue
        if shape != "string":
            strings += [s for s in _strings(path, shape, value, name in texts) if s.text or s.value not in skips]
        elif name in texts:
            strings.append(String(path, value, True))
        elif value not in skips:
            strings.append(String(path, value, False))


def path_of(path: Path) -> str:
    """A path in words: `versions/tools/#0` is the first key, `versions/tools/0` its value."""
    return "/".join(f"{'#' * (step[0] == 'key')}{step[1]}" if isinstance(step, tuple) else str(step) for step in path)


def with_values(record: Mapping[str, object], values: Mapping[Path, str | bytes]) -> dict[str, Any]:
    """A copy of a record that reads `values` at their paths."""
    out: dict[str, Any] = dict(record)
    for path, value in values.items():
        holder: Any = out
        for step in path[:-1]:
            child = _copy(_item(holder, step))
            _put(holder, step, child)
            holder = child
        _put(holder, path[-1], value)
    return out


def _copy(value: Any) -> dict[str, object] | list[object]:
    return dict(value) if isinstance(value, Mapping) else list(value)


def _item(holder: Any, step: Step) -> Any:
    return list(holder.values())[step[1]] if isinstance(step, tuple) else holder[step]


def _put(holder: Any, step: Step, value: object) -> None:
    if not isinstance(step, tuple):
        holder[step] = value
        return
    part, number = step
    entries = list(holder.items())
    entries[number] = (value, entries[number][1]) if part == "key" else (entries[number][0], value)
    holder.clear()
    holder.update(entries)


@cache
def _fields(record: str, part: str) -> tuple[tuple[str, Shape, Path], ...]:
    """(field, schema, path) of the fields of a record that hold strings, or bytes that may be text."""
    schema = current(record).definition
    fields = ((field["name"], _string_shape(field["type"], schema["__named_schemas"])) for field in schema["fields"])
    omissions = _REFINE_FIELDS if record == ENVELOPE else ()
    return tuple((name, shape, (part, name)) for name, shape in fields if shape is not None and name not in omissions)


def _string_shape(schema: AvroType, types: Mapping[str, AvroSchema]) -> Shape | None:
    """A schema with its nulls and whatever holds no string left out; None when nothing is left."""
    if isinstance(schema, list):
        return next((inner for part in schema if (inner := _string_shape(part, types)) is not None), None)
    if isinstance(schema, str):
        # A type that came before is only named.
        return (
            _string_shape(types[schema], types)
            if schema in types
            else schema
            if schema in ("string", "bytes")
            else None
        )
    match schema["type"]:
        case "record" if schema["name"] == ARRAY:
            return None
        case "record":
            fields = {field["name"]: _string_shape(field["type"], types) for field in schema["fields"]}
            return {name: shape for name, shape in fields.items() if shape is not None} or None
        case "array":
            items = _string_shape(schema["items"], types)
            return None if items is None else ("array", items)
        case "map":
            return ("map", _string_shape(schema["values"], types))
        case _:
            return None


def _strings(path: Path, shape: Any, value: Any, text: bool) -> Iterator[String]:
    """Depth is that of the schema: at most a map in a record in a list."""
    if shape == "string":
        if value is not None:
            yield String(path, value, text)
    elif shape == "bytes":
        if text:
            yield String(path, value, True)
    elif value is None:
        return
    elif isinstance(shape, dict):
        for name, inner in shape.items():
            yield from _strings((*path, name), inner, value[name], text)
    elif shape[0] == "array":
        for number, item in enumerate(value):
            yield from _strings((*path, number), shape[1], item, text)
    else:
        for number, (key, item) in enumerate(value.items()):
            yield String((*path, ("key", number)), key, text)
            if shape[1] is not None:
                yield from _strings((*path, ("value", number)), shape[1], item, text)
