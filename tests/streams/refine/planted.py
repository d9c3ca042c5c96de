"""Secrets planted in every place of an event that its schema has, and all that refine writes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from millrace.infra.config import Governance, Tenant
from millrace.infra.log.base import Record
from millrace.infra.stages.fold import Fold
from millrace.infra.stages.state import SlotState
from millrace.schemas import codec
from millrace.schemas.chain import START, event_hash
from millrace.schemas.registry import current
from millrace.streams.refine.detectors.base import Detector
from millrace.streams.refine.stage import Refine

NOW = 1_700_000_000_000_000
SECRETS = {
    "github": "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "aws": "AKIAQYLPMN5HHHFPZAM2",
    "letters": "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "card": "4111 1111 1111 1111",
    "phone": "+49 30 901820",
    "iban": "DE89 3704 0044 0532 0130 00",
    "session": "mr-0190f3a2-7c1b-7d3e-8f00-1234567890ab." + "0123456789abcdef" * 2,
}
ENVELOPE_SKIPS = {"governance", "source_place", "prev_hash", "hash", "source_hash", "body"}
JSON_BYTES = {"request", "response"}


class Planter:
    """Makes records of a schema, with a text at the string number `target` in the order of the schema."""

    def __init__(self, text: str, target: int, kind: str) -> None:
        self._text, self._target, self.count = text, target, 0
        self._named: dict[str, Any] = {}
        for record in ("Event", codec.BODIES[kind]):
            self._named |= current(record).definition["__named_schemas"]

    def string(self) -> str:
        self.count += 1
        return self._text if self.count - 1 == self._target else f"word{self.count}"

    def make(self, schema: Any, name: str = "") -> Any:
        schema = self._named.get(schema, schema) if isinstance(schema, str) else schema
        if isinstance(schema, list):
            return self.make(next(part for part in schema if part != "null"), name)
        match schema if isinstance(schema, str) else schema["type"]:
            case "string":
                return self.string()
            case "bytes":
                return orjson.dumps({"messages": [{"content": self.string()}]}) if name in JSON_BYTES else b""
            case "boolean":
                return True
            case "int" | "long":
                return 1
            case "float" | "double":
                return 0.5
            case "enum":
                return schema["symbols"][0]
            case "array":
                return [self.make(schema["items"])]
            case "map":
                return {self.string(): self.make(schema["values"])}
            case _:
                return {field["name"]: self.make(field["type"], field["name"]) for field in schema["fields"]}


def events(kind: str, text: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(event, place) for every string of an event of a kind, envelope and body, with a text planted in it."""
    envelope = [field for field in current("Event").definition["fields"] if field["name"] not in ENVELOPE_SKIPS]
    target = 0
    while True:
        planter = Planter(text, target, kind)
        event = {field["name"]: planter.make(field["type"]) for field in envelope}
        body = planter.make(current(codec.BODIES[kind]).definition)
        for name in ("prompt_ids", "output_ids", "output_logprobs", "output_versions"):
            if name in body and body[name]["dtype"] != text:
                body[name]["dtype"] = "int32"
        if planter.count <= target:
            return
        yield finished(event, kind, body), f"{kind} string {target}"
        target += 1


def finished(event: dict[str, Any], kind: str, body: Any) -> dict[str, Any]:
    """An event with its body and a true hash."""
    ours = {"governance": None, "source_place": None, "source_hash": None, "log_time": None, "prev_hash": START}
    event = event | ours | {"kind": kind, "hash": b"", "body_encoding": "plain", "body": codec.encode_body(kind, body)}
    event["hash"] = event_hash(START, event)
    return event


def stage(*detectors: Detector) -> Refine:
    """Refine for any tenant."""
    return Refine(Governance(tenants={"default": Tenant()}), detectors, slots=1, name_key=b"k")


def fold(refine: Refine, sent: Sequence[tuple[bytes, bytes, dict[str, bytes]]]) -> tuple[list[Any], list[bytes]]:
    """(emits, every byte string that they and the state come to) of raw records of (key, value, headers)."""
    state = SlotState(0, strict=True)
    records = [Record("w.raw", 0, n, key, value, headers, 0) for n, (key, value, headers) in enumerate(sent)]
    emits = [emit for _, emit in Fold(refine, state, skip_duplicates=False).turn(records, NOW).emits]
    written = [part for key, value in state.changes() for part in (key, value or b"")]
    for emit in emits:
        written += [emit.key.encode(), codec.encode(emit.name, emit.record)]
        written += [text.encode() for pair in emit.headers.items() for text in pair]
    return emits, written


def sent(event: dict[str, Any], **headers: str) -> tuple[bytes, bytes, dict[str, bytes]]:
    """An event as its raw record."""
    key = f"{event['tenant']}/{event['group']}".encode()
    return key, codec.encode("Event", event), {name: text.encode() for name, text in headers.items()}


def ends(emits: Sequence[Any]) -> list[str]:
    """What the records became: kinds of the records that end one."""
    return [emit.name for emit in emits if emit.name in ("Event", "DeadLetter")]
