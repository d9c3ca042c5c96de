"""All calls of an episode that ended, for a judge that reads more than its output: looked up in the history.

    the end of an episode -> where it can have begun -> its calls up to the end, as JSON

Invariants: what was taken out of a call, or withheld, is not shown here either; a call is shown as the log has it, with
what it does not repeat of an earlier one; a conversation of which a call is missing, sealed or blanked is none; what is
shown fits `most` bytes: where it does not, calls behind the first are left out, and their number is told."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import orjson

from millrace.infra.engines.upstream import NOT_WHOLE
from millrace.infra.log.base import Bus, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError
from millrace.schemas.json_values import Json, JsonObject
from millrace.schemas.records import Event, ModelCall
from millrace.streams.decoding import Decoder, Unreadable

SLACK_US = 60_000_000
"""micros by which the clocks of a gateway and of a stage may differ"""
MARGIN = 64
"""bytes at most of what stands around the calls"""


class JudgedCall(NamedTuple):
    """A call that was made: its event's id, and its body."""

    event: str
    body: ModelCall


class Conversations:
    """Those of the episodes in `topic` (full name), of at most `most` bytes each."""

    def __init__(self, bus: Bus, topic: str, claims: ClaimStore | None, most: int) -> None:
        self._bus = bus
        self._topic = topic
        self._claims = claims
        self._most = most

    def of(self, end: Record, episode: Event) -> str | None:
        """The calls of the episode that ended with this record, as JSON text; None where they are not all there, or do
        not fit. Raises BusError."""
        start = self._bus.since(self._topic, began(episode["trajectory"]) - SLACK_US)[end.partition]
        calls: list[JudgedCall] = []
        try:
            for event in self._events(end, episode["trajectory"], start):
                if event["body_encoding"] != "plain" or _is_blank(event):
                    return None
                calls.append(JudgedCall(event["id"], codec.decode_body("model_call", event["body"])))
        except (Unreadable, SchemaError):
            return None
        return text_of(calls, self._most)

    def _events(self, end: Record, trajectory: str, start: int) -> Iterator[Event]:
        decode, header = Decoder(self._claims), trajectory.encode()
        for record in self._bus.read(self._topic, end.partition, start, end.offset):
            if record.headers.get("kind") == b"model_call" and record.headers.get("trajectory") == header:
                name, content = decode(record)
                if name == "Event":
                    yield cast(Event, content)


def _is_blank(event: Event) -> bool:
    """Whether refine put something else in the place of an event's text."""
    governance = event["governance"]
    return governance is not None and (governance["eligibility"] == "denied" or governance["redaction"] == "failed")


def began(trajectory: str) -> int:
    """Micros before which nothing of a trajectory was written: its id says when it was made; 0 for one that does
    not."""
    try:
        id = uuid.UUID(trajectory)
    except ValueError:
        return 0
    return (id.int >> 80) * 1000 if id.version == 7 else 0


def text_of(calls: Sequence[JudgedCall], most: int) -> str | None:
    """The calls as one JSON text of at most so many bytes; None where there are none, where one goes on from a request
    that is not among them, and where not even the first and the last fit."""
    numbers = {call.event: number for number, call in enumerate(calls, 1)}
    if not calls or any((base := call.body["request_base"]) is not None and base not in numbers for call in calls):
        return None
    replaced_ids = {call.body["supersedes"] for call in calls} - {None}
    entries = [
        orjson.dumps(
            {"call": number, **_call_fields(call.body, numbers, is_repeat=call.body["response_id"] in replaced_ids)}
        )
        for number, call in enumerate(calls, 1)
    ]
    text = _calls_json(entries, 0)
    if len(text) <= most:
        return text.decode()
    first, rest = entries[0], entries[1:]
    room, tail = most - MARGIN - len(first), list[bytes]()
    for one in reversed(rest):
        room -= len(one) + 1
        if room < 0:
            break
        tail.insert(0, one)
    if room < 0 and not tail:
        return None
    return _calls_json([first, *tail], len(rest) - len(tail)).decode()


def _calls_json(entries: Sequence[bytes], left_out: int) -> bytes:
    note = b'"calls_left_out_behind_the_first":%d,' % left_out if left_out else b""
    return b"{" + note + b'"calls":[' + b",".join(entries) + b"]}"


def _call_fields(call: ModelCall, numbers: dict[str, int], *, is_repeat: bool) -> JsonObject:
    base = call["request_base"]
    out: JsonObject = {}
    if base is not None:
        out = {"goes_on_from_call": numbers[base], "repeats_of_it": call["request_kept"]}
    if call["opened"] == NOT_WHOLE:
        out["earlier_messages"] = "not known"
    if is_repeat:
        out["asked_once_more"] = True
    return {**out, "request": _json(call["request"]), "response": _json(call["response"])}


def _json(data: bytes) -> Json:
    """What some bytes hold: a value, or the text that they are."""
    try:
        found: Json = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode("utf-8", "replace")
    return found
