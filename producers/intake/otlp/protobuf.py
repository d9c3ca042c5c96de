"""Requests of OTLP in protobuf, as spans: what `millrace.formats.spans.otlp_json` reads of the same in JSON. Pure.

https://opentelemetry.io/docs/specs/otlp/

Invariant: a request is parsed only after its fields were counted, so that a small body never becomes many objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from millrace.formats.episodes.rows import Content
from millrace.formats.spans.otlp_json import Span, SpanEvent, log_record_span, micros
from millrace.schemas import bounds

Fields = Mapping[int, Descriptor]
"""fields of a message that are messages, by number"""
ERROR = 2
"""a span's status"""


class MalformedBody(Exception):
    """A body that is no message."""


class TooMany(Exception):
    """A body of more values, or deeper, than is read."""


def traces(data: bytes) -> Iterator[Span]:
    """The spans of an `ExportTraceServiceRequest`. Raises MalformedBody, TooMany."""
    message = _parse(ExportTraceServiceRequest, data)
    for of_resource in message.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for scope in of_resource.scope_spans:
            for one in scope.spans:
                yield Span(
                    one.trace_id.hex(),
                    one.span_id.hex(),
                    one.parent_span_id.hex(),
                    one.name,
                    micros(one.start_time_unix_nano),
                    micros(one.end_time_unix_nano),
                    one.status.code == ERROR,
                    _attributes(one.attributes),
                    [
                        SpanEvent(event.name, _attributes(event.attributes), micros(event.time_unix_nano))
                        for event in one.events
                    ],
                    resource,
                )


def logs(data: bytes) -> Iterator[Span]:
    """The log records of an `ExportLogsServiceRequest`. Raises MalformedBody, TooMany."""
    message = _parse(ExportLogsServiceRequest, data)
    for of_resource in message.resource_logs:
        resource = _attributes(of_resource.resource.attributes)
        for scope in of_resource.scope_logs:
            for one in scope.log_records:
                yield log_record_span(
                    one.trace_id.hex(),
                    one.span_id.hex(),
                    one.event_name,
                    micros(one.time_unix_nano) or micros(one.observed_time_unix_nano),
                    _attributes(one.attributes),
                    _value(one.body),
                    resource,
                )


def _parse(kind: Any, data: bytes) -> Any:
    measure(data, kind.DESCRIPTOR)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedBody(f"the body is no {kind.DESCRIPTOR.name}") from error


def measure(data: bytes, kind: Descriptor, values: int = bounds.OTLP_VALUES) -> None:
    """Raises TooMany for a message of more fields than `values`, all that it holds included, or nested deeper than is
    read; MalformedBody where it breaks off."""
    budget = values
    waiting: list[tuple[int, int, Fields, int]] = [(0, len(data), _inner(kind), 0)]
    while waiting:
        at, end, fields, depth = waiting.pop()
        if depth > bounds.OTLP_DEPTH:
            raise TooMany(f"the body nests deeper than {bounds.OTLP_DEPTH} levels (OTLP_DEPTH)")
        while at < end:
            budget -= 1
            if budget < 0:
                raise TooMany(f"the body holds more than {values:,} values (OTLP_VALUES)")
            tag, at = _varint(data, at, end)
            match tag & 7:
                case 0:
                    _, at = _varint(data, at, end)
                case 1:
                    at += 8
                case 2:
                    length, at = _varint(data, at, end)
                    inner = fields.get(tag >> 3)
                    if inner is not None and length:
                        waiting.append((at, at + length, _inner(inner), depth + 1))
                    at += length
                case 5:
                    at += 4
                case _:
                    raise MalformedBody("the body has a field of no type that OTLP uses")
            if at > end:
                raise MalformedBody("the body breaks off inside of a field")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise MalformedBody("the body breaks off inside of a number")


@cache
def _inner(kind: Descriptor) -> Fields:
    fields = kind.fields_by_number.items()
    return {number: field.message_type for number, field in fields if field.message_type is not None}


def _attributes(pairs: Iterable[Any]) -> Content:
    return {one.key: _value(one.value) for one in pairs if one.key}


def _value(any_value: Any) -> Any:
    """An AnyValue as a plain value; None for bytes and for one of no known type."""
    kind = any_value.WhichOneof("value")
    match kind:
        case "string_value" | "bool_value" | "int_value" | "double_value":
            return getattr(any_value, kind)
        case "array_value":
            return [_value(one) for one in any_value.array_value.values]
        case "kvlist_value":
            return _attributes(any_value.kvlist_value.values)
    return None
