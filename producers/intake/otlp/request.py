"""One body of OTLP over HTTP: uncompressed, measured, read, and each span judged by itself. Pure.

Invariants: nothing is uncompressed beyond the limit, nor parsed before it was measured; a span is refused for what it
says alone, by a code, and the others are taken as if it had not been there; what was taken together can be made into
events."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import orjson

from millrace.dialects.shape import measure
from millrace.formats.episodes.event_bodies import Bodies
from millrace.formats.episodes.rows import BadRow
from millrace.formats.episodes.sealer import Kin, Sealer
from millrace.formats.spans import otlp_json as in_json
from millrace.formats.spans.conventions import normal
from millrace.formats.spans.conversation import SpanConversation, claimed_reward
from millrace.formats.spans.genai import CONVERSATION, EVALUATION, matters, talk
from millrace.formats.spans.otlp_json import Span, SpanEvent, size_of
from millrace.producers.intake.otlp import protobuf
from millrace.producers.intake.otlp.conversation_events import OTLP, SILENCE_CODES
from millrace.schemas import bounds
from millrace.schemas.limits import CONTROL

JSON, PROTOBUF = "application/json", "application/x-protobuf"
TRACES, LOGS = "traces", "logs"
ENCODINGS = ("gzip", "deflate")
_KEYS: Mapping[str, str] = {TRACES: "resourceSpans", LOGS: "resourceLogs"}
_READ = {TRACES: protobuf.traces, LOGS: protobuf.logs}
_ID, _TRACE = "00" * 8, "00" * 16
_SAYS = {"gen_ai.operation.name": "chat"}
_PROBE = Span(
    _TRACE,
    "probe",
    "",
    "probe",
    bounds.TIME,
    bounds.TIME,
    False,
    {
        **_SAYS,
        "gen_ai.input.messages": [{"role": "user", "content": "?"}],
        "gen_ai.output.messages": [{"role": "assistant", "content": "."}],
    },
    [],
    {},
)
"""a call beside which any other span can be made into events"""


class BadBody(Exception):
    """A body that cannot be read. status: of HTTP."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(slots=True)
class SpanBatch:
    """What a request brings: spans that are taken, how many were refused, for which reasons, with the first in words,
    and what else was passed over."""

    spans: list[Span] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    detail: str = ""


def read(signal: str, media: str, encoding: str, data: bytes, limit: int) -> SpanBatch:
    """A request. signal: traces or logs; media: `JSON` or `PROTOBUF`. Raises BadBody."""
    body = inflate(data, encoding, limit)
    spans = _json(signal, body) if media == JSON else _protobuf(signal, body)
    out = SpanBatch()
    for span in spans:
        try:
            out.spans.append(_accept(span))
        except BadRow as error:
            out.refusals[error.code] += 1
            out.detail = out.detail or f"{error.code}: {error}"
    return out


def inflate(data: bytes, encoding: str, limit: int) -> bytes:
    """A body without its compression, one of `ENCODINGS`, or "". Raises BadBody 413 beyond `limit` bytes, 400 for data
    that is none."""
    if not encoding:
        return data
    out: list[bytes] = []
    size = 0
    while data:
        reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib, whichever it says
        try:
            out.append(reader.decompress(data, limit + 1 - size))
        except zlib.error:
            raise BadBody(400, f"the body is no {encoding}") from None
        size += len(out[-1])
        if size > limit:
            raise BadBody(413, f"the body is larger than {limit:,} bytes once it is uncompressed")
        if not reader.eof:
            raise BadBody(400, f"the {encoding} of the body breaks off")
        data = reader.unused_data  # gzip may have several members
    return b"".join(out)


def _json(signal: str, data: bytes) -> Iterable[Span]:
    shape = measure(data)
    if shape.depth > bounds.OTLP_DEPTH or shape.values > bounds.OTLP_VALUES:
        raise BadBody(
            400,
            f"the body nests deeper than {bounds.OTLP_DEPTH} levels (OTLP_DEPTH) or holds more than "
            f"{bounds.OTLP_VALUES:,} values (OTLP_VALUES): send smaller batches",
        )
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise BadBody(400, "the body is no JSON") from None
    key = _KEYS[signal]
    if not isinstance(content, dict) or not isinstance(content.get(key, []), list):
        raise BadBody(400, f"the body is no JSON object with a list {key}")
    return in_json.spans({key: content.get(key)})


def _protobuf(signal: str, data: bytes) -> Iterable[Span]:
    try:
        return list(_READ[signal](data))
    except protobuf.TooMany as error:
        raise BadBody(400, f"{error}: send smaller batches") from None
    except protobuf.MalformedBody as error:
        raise BadBody(400, str(error)) from None


def _accept(raw: Span) -> Span:
    """A span as it is kept. Raises BadRow for one that cannot be made into events."""
    if not _is_id(raw.trace, 32) or not _is_id(raw.id, 16):
        if not raw.log:
            raise BadRow("bad_id", "a span needs a trace id of 16 bytes and a span id of 8, not all zero")
        trace, id = (raw.trace if _is_id(raw.trace, 32) else ""), (raw.id if _is_id(raw.id, 16) else "")
        raw = replace(raw, trace=trace, id=id)
    span = normal(raw)
    if not matters(span):
        attributes = {name: value for name, value in span.attributes.items() if name == CONVERSATION}
        return replace(span, name="", attributes=attributes, events=[], resource={}) if not span.log else span
    size_of(span)
    _check(span)
    return span


def _is_id(id: str, digits: int) -> bool:
    return len(id) == digits and set(id) <= _HEX and id.strip("0") != ""


_HEX = frozenset("0123456789abcdef")


def _check(span: Span) -> None:
    """Raises BadRow unless it can be made into events, alone and beside others."""
    for event in span.events:
        if event.name == EVALUATION:
            claim = claimed_reward(event, None)
            if claim is not None and CONTROL.search(claim.source):
                raise BadRow("bad_source", f"gen_ai.evaluation.name has a control character: {claim.source!r}")
        else:
            talk(_strip(span, [event]), ())
    probe = replace(span, trace=_TRACE, log=False)
    if span.log:
        probe = _strip(span, span.events)
    for spans in ([probe], [probe, _PROBE]):
        try:
            episode = SpanConversation(spans, Counter()).episode()
        except BadRow as error:
            if error.code in SILENCE_CODES:
                continue
            raise
        kin = Kin(_TRACE, _TRACE, _TRACE, _TRACE)
        sealer = Sealer("p", "t", kin, "train", episode.trace)
        for number, draft in enumerate(Bodies(OTLP, _TRACE, episode).drafts()):
            sealer.seal(draft, _TRACE, "s", 0, number)
        return


def _strip(span: Span, events: Iterable[SpanEvent]) -> Span:
    return replace(span, trace=_TRACE, id=_ID, attributes=dict(_SAYS), events=list(events), log=False)
