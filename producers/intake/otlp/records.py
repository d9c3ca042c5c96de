"""What the receiver's own log holds: spans that were taken, and conversations that are over.

Invariant: an entry says all that its fold needs, clock included, so that the same log makes the same events again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from millrace.formats.episodes.rows import Content
from millrace.formats.spans.otlp_json import Span
from millrace.schemas.ids import Micros


class Took(msgspec.Struct, frozen=True, tag="took"):
    """Spans and log records of one tenant. at: when they came."""

    tenant: str
    at: Micros
    spans: Sequence[Span]


class ClosedConversation(msgspec.Struct, frozen=True, tag="closed"):
    """Traces of a tenant that are one conversation, which is over. since: the entry that holds the first of their
    spans; captured: ids of replies in them that the gateway has in the log itself."""

    tenant: str
    at: Micros
    traces: list[str]
    since: int
    captured: list[str]


Record = Took | ClosedConversation


class _StoredSpans(msgspec.Struct, frozen=True, tag="took"):
    """`Took` with each resource once: what a batch says of its sender is the same for all of its spans."""

    tenant: str
    at: Micros
    resources: list[Content]
    spans: list[Span]
    whose: list[int]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_StoredSpans | ClosedConversation).decode
_NO_CONTENT: Content = {}


def encode(record: Record) -> bytes:
    """The bytes of a record."""
    if isinstance(record, ClosedConversation):
        return _encode(record)
    resources: list[Content] = []
    places: list[int] = []
    for span in record.spans:
        # The newest is nearly always the same object, and the others are few.
        at = next((n for n in range(len(resources) - 1, -1, -1) if resources[n] is span.resource), len(resources))
        if at == len(resources):
            resources.append(span.resource)
        places.append(at)
    spans = [replace(span, resource=_NO_CONTENT) for span in record.spans]
    return _encode(_StoredSpans(record.tenant, record.at, resources, spans, places))


def decode(data: bytes) -> Record:
    """The record of some bytes. Raises msgspec.MsgspecError."""
    record = _decode(data)
    if isinstance(record, ClosedConversation):
        return record
    spans = [replace(span, resource=record.resources[at]) for span, at in zip(record.spans, record.whose, strict=True)]
    return Took(record.tenant, record.at, spans)
