"""Anthropic's Messages of an upstream, and their stream put together again.

Invariants: a block is known by its index, and what a server says of no open block is unread; the input of a tool that
is cut off, and so no JSON, stays text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import orjson

from millrace.dialects import shape
from millrace.dialects.answers import WholeAnswer, arguments_text, mapping, name, number, text
from millrace.dialects.messages.threads import flatten, for_record
from millrace.dialects.reading.events import ReplyEvents
from millrace.dialects.reading.reader import DialectReader, NamedBefore, single
from millrace.dialects.stored_responses import Recall
from millrace.infra.engines.base import ABORT
from millrace.schemas import bounds
from millrace.schemas.ids import new_id
from millrace.schemas.json_values import Json, JsonObject

FINISH = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
"""reasons of an end by their name; others keep their own"""
INPUT = "partial_json"
PIECES = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": INPUT,
}
"""the field of each kind of delta that adds to a text, by its type"""
CITATIONS = "citations_delta"
EMPTY_REQUEST = b'{"messages":[]}'


class MessagesReader(DialectReader):
    """`POST /messages`."""

    told_in = "content"

    def answer_in(self, response: Mapping[str, Json]) -> WholeAnswer:
        usage, reason = mapping(response.get("usage")), name(response.get("stop_reason"))
        read, creation = (number(usage.get(f"cache_{kind}_input_tokens")) for kind in ("read", "creation"))
        prompt = number(number(usage.get("input_tokens")) + read + creation)
        counts = (prompt, number(usage.get("output_tokens")), read)
        message = self.dialect.read(EMPTY_REQUEST, response).replies[0]
        return single(name(response.get("id")) or new_id(), message, FINISH.get(reason or "", reason), counts)

    def assembler(self) -> ReplyEvents:
        return AssembledMessages()

    def named(self, body: bytes, recall: Callable[[], Recall]) -> NamedBefore | None:
        return for_record(body, recall()) if b"previous_message_id" in body else None

    def flatten(self, body: bytes) -> bytes:
        return flatten(body)


@dataclass(slots=True)
class BlockParts:
    """A block as it began, and the pieces that came for each of its fields."""

    index: int
    block: JsonObject
    pieces: dict[str, list[str]] = field(default_factory=dict)


class AssembledMessages(ReplyEvents):
    """A stream of named events."""

    def __init__(self) -> None:
        super().__init__()
        self._head: JsonObject = {}
        self._blocks: list[BlockParts] = []
        self._open: dict[int, BlockParts] = {}
        self._end: JsonObject = {}

    def take(self, event: JsonObject) -> bool:
        match event.get("type"):
            case "message_start":
                self._head = dict(mapping(event.get("message")))
                if counts := mapping(self._head.get("usage")):  # of a reply that is still to come it counts nothing
                    self._head["usage"] = {name: count for name, count in counts.items() if name != "output_tokens"}
            case "content_block_start":
                return self._begin(event.get("index"), event.get("content_block"))
            case "content_block_delta":
                return self._piece(event.get("index"), mapping(event.get("delta")))
            case "message_delta":
                self.closing = True
                self._end |= mapping(event.get("delta"))
                usage = self._head.get("usage")
                if not isinstance(usage, dict):
                    usage = self._head["usage"] = {}
                usage.update(mapping(event.get("usage")))  # in place: a server may send as many as it likes
            case "error":
                self._end["stop_reason"] = ABORT
        return True

    def _begin(self, index: object, block: object) -> bool:
        if not isinstance(index, int) or not isinstance(block, dict):
            return False
        former = self._open.get(index)
        if former is not None and former.block == block and not former.pieces:
            return True  # the same one, said once more
        if len(self._blocks) >= bounds.PARTS:
            return False
        self._open[index] = BlockParts(index, block)
        self._blocks.append(self._open[index])
        return True

    def _piece(self, index: object, delta: Mapping[str, Json]) -> bool:
        kind = delta.get("type")
        if kind == CITATIONS:
            return True
        part = PIECES.get(kind, "") if isinstance(kind, str) else ""
        piece = delta.get(part)
        if part == INPUT and isinstance(piece, dict):
            piece = arguments_text(piece)
        if not isinstance(index, int) or index not in self._open or not isinstance(piece, str):
            return False
        self._open[index].pieces.setdefault(part, []).append(piece)
        return True

    def response(self) -> JsonObject:
        if not self._head and self.finish is None:
            return {}  # no event of a message came
        room, content = bounds.VALUES, list[JsonObject]()
        for parts in sorted(self._blocks, key=lambda parts: parts.index):
            block, texts = parts.block, {part: "".join(pieces) for part, pieces in parts.pieces.items()}
            room -= sum(texts.get(INPUT, "").count(mark) for mark in ",:{[") + 1
            content.append(_fill_block(block, texts, room >= 0))
        reason = self.finish or self._end.get("stop_reason")
        head = {"type": "message", "role": "assistant", **self._head, **self._end}
        return {**head, "type": "message", "content": content, "stop_reason": reason}


def _fill_block(block: JsonObject, texts: dict[str, str], room: bool) -> JsonObject:
    """A block with the pieces that came for it; the input of a tool as text where there is no `room` for its values."""
    out = dict(block)
    if input_text := texts.pop(INPUT, ""):
        out["input"] = _input(input_text) if room else input_text
    for part, piece in texts.items():
        out[part] = (text(block.get(part)) or "") + piece
    return out


def _input(input_text: str) -> Json:
    try:
        return input_text if shape.unwieldy(input_text) else orjson.loads(input_text)
    except orjson.JSONDecodeError:
        return input_text
