"""OTLP in JSON: spans and log records of a line, with their attributes as plain values. Pure.

Invariants: bytes come from any exporter, so an attribute of no known type reads as nothing; ids are lower-case hex;
times are micros, and None where a span has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from millrace.dialects.answers import listed, mapping
from millrace.formats.episodes.rows import Content, json_text, whole_number
from millrace.schemas import bounds
from millrace.schemas.ids import Micros

KEYS = ("resourceSpans", "resourceLogs")


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A named event with attributes: of a span, or a log record beside one."""

    name: str
    attributes: Content
    at: Micros | None


@dataclass(frozen=True, slots=True)
class Span:
    """One span; or, where `log` is, a log record that belongs to one."""

    trace: str
    id: str
    parent: str
    name: str
    start: Micros | None
    end: Micros | None
    has_failed: bool
    attributes: Content
    events: Sequence[SpanEvent]
    resource: Content
    log: bool = False


def spans(content: Mapping[str, object]) -> Iterator[Span]:
    """Every span and log record of a line that says which trace it belongs to."""
    for resource, item in _items(content, "resourceSpans", "scopeSpans", "spans"):
        events = [_event(one) for one in maps(item.get("events"))]
        yield Span(
            _hex(item.get("traceId")),
            _hex(item.get("spanId")),
            _hex(item.get("parentSpanId")),
            str(item.get("name", "")),
            micros(item.get("startTimeUnixNano")),
            micros(item.get("endTimeUnixNano")),
            _has_failed(item.get("status")),
            attributes(item.get("attributes")),
            events,
            resource,
        )
    for resource, item in _items(content, "resourceLogs", "scopeLogs", "logRecords"):
        yield log_record_span(
            _hex(item.get("traceId")),
            _hex(item.get("spanId")),
            str(item.get("eventName") or ""),
            micros(item.get("timeUnixNano")) or micros(item.get("observedTimeUnixNano")),
            attributes(item.get("attributes")),
            value(item.get("body")),
            resource,
        )


def log_record_span(
    trace: str, span: str, name: str, at: Micros | None, attributes: Content, body: object, resource: Content
) -> Span:
    """A log record as what is said beside the span that it names; its body, where it is a map, among its
    attributes."""
    name = name or str(attributes.get("event.name") or "")
    event = SpanEvent(name, {**attributes, **(body if isinstance(body, dict) else {})}, at)
    return Span(trace, span, "", name, at, at, False, attributes, [event], resource, log=True)


def attributes(pairs: object) -> Content:
    """A list of keys and values as a map."""
    return {str(one["key"]): value(one.get("value")) for one in maps(pairs) if isinstance(one.get("key"), str)}


def value(any_value: object) -> object:
    """An AnyValue as a plain value; None for one of no known type."""
    if not isinstance(any_value, Mapping):
        return None
    for kind in ("stringValue", "boolValue", "doubleValue"):
        if kind in any_value:
            return any_value[kind]
    if "intValue" in any_value:
        try:
            return int(any_value["intValue"])
        except (TypeError, ValueError):
            return None
    if "arrayValue" in any_value:
        return [value(one) for one in listed(mapping(any_value["arrayValue"]).get("values"))]
    if "kvlistValue" in any_value:
        return attributes(mapping(any_value["kvlistValue"]).get("values"))
    return None


def _items(content: Mapping[str, object], outer: str, middle: str, inner: str) -> Iterator[tuple[Content, Content]]:
    for resource in maps(content.get(outer)):
        resource_attributes = attributes(mapping(resource.get("resource")).get("attributes"))
        for scope in maps(resource.get(middle)):
            for item in maps(scope.get(inner)):
                yield resource_attributes, item


def _event(fields: Content) -> SpanEvent:
    return SpanEvent(
        str(fields.get("name", "")), attributes(fields.get("attributes")), micros(fields.get("timeUnixNano"))
    )


def _has_failed(status: object) -> bool:
    return mapping(status).get("code") in (2, "2", "STATUS_CODE_ERROR")


def _hex(text: object) -> str:
    return text.lower() if isinstance(text, str) and len(text) <= 64 else ""


def micros(nanos: object) -> Micros | None:
    """Nanoseconds since the epoch, a number or one as text, as micros; None for none, and for what is no time."""
    if isinstance(nanos, str) and nanos.isdecimal() and len(nanos) < 24:
        nanos = int(nanos)
    if not isinstance(nanos, int) or isinstance(nanos, bool) or nanos <= 0:
        return None
    return nanos // 1000 if nanos // 1000 <= bounds.TIME else None


def maps(items: object) -> list[Content]:
    """The maps of a list that is one."""
    return [one for one in listed(items) if isinstance(one, dict)]


def tokens(attributes: Mapping[str, object], *names: str) -> int:
    """The first of these attributes that is a count."""
    return next((count for name in names if (count := whole_number(attributes.get(name)))), 0)


def size_of(span: Span) -> int:
    """Bytes of what it says, as JSON."""
    contents: list[Content] = [span.attributes, *(event.attributes for event in span.events)]
    return sum(len(json_text(one)) for one in contents)
