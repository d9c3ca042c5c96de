"""OpenAI's Responses of an upstream, and their stream put together again.

Invariants: the response with which a stream ends counts for the whole of it; a stream that is cut off amounts to the
items that came, the last ones as far as they came."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from millrace.dialects.answers import WholeAnswer, arguments_text, listed, mapping, name, number, text
from millrace.dialects.reading.events import ReplyEvents
from millrace.dialects.reading.reader import DialectReader, NamedBefore, single
from millrace.dialects.responses.expand import flatten, for_record, refers
from millrace.dialects.stored_responses import Recall
from millrace.infra.engines.base import ABORT
from millrace.schemas import bounds
from millrace.schemas.ids import new_id
from millrace.schemas.json_values import Json, JsonObject

ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
DELTA = ".delta"
PIECES = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_summary_text.delta": "summary",
    "response.reasoning_text.delta": "thought",
    "response.function_call_arguments.delta": "arguments",
    "response.mcp_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
    "response.code_interpreter_call_code.delta": "code",
}
"""what each event that adds to a text adds to"""
EMPTY_REQUEST = b'{"input":[]}'


class ResponsesReader(DialectReader):
    """`POST /responses`."""

    told_in = "output"

    def answer_in(self, response: Mapping[str, Json]) -> WholeAnswer:
        usage = mapping(response.get("usage"))
        cached_tokens = number(mapping(usage.get("input_tokens_details")).get("cached_tokens"))
        counts = (number(usage.get("input_tokens")), number(usage.get("output_tokens")), cached_tokens)
        message = self.dialect.read(EMPTY_REQUEST, response).replies[0]
        return single(name(response.get("id")) or new_id(), message, _finish(response, message), counts)

    def assembler(self) -> ReplyEvents:
        return AssembledResponses()

    def named(self, body: bytes, recall: Callable[[], Recall]) -> NamedBefore | None:
        return for_record(body, recall()) if refers(body) or b"conversation" in body else None

    def flatten(self, body: bytes) -> bytes:
        return flatten(body)


def _finish(response: Mapping[str, Json], message: Mapping[str, Json]) -> str | None:
    match response.get("status"):
        case "completed":
            return "tool_calls" if message.get("tool_calls") else "stop"
        case "incomplete":
            reason = name(mapping(response.get("incomplete_details")).get("reason"))
            return "length" if reason == "max_output_tokens" else reason
        case _:
            return None


@dataclass(slots=True)
class ItemParts:
    """An item as it was said last, and the pieces that came for each of its fields since."""

    index: int
    item: JsonObject
    pieces: dict[str, list[str]] = field(default_factory=dict)


class AssembledResponses(ReplyEvents):
    """A stream of named events."""

    def __init__(self) -> None:
        super().__init__()
        self._response: JsonObject = {}
        self._items: list[ItemParts] = []
        self._open: dict[int, ItemParts] = {}

    def take(self, event: JsonObject) -> bool:
        kind, index = event.get("type"), event.get("output_index")
        if kind in ENDS or kind in ("response.created", "response.in_progress"):
            self._response = dict(mapping(event.get("response")))
            self.closing |= kind in ENDS
        elif kind in ("response.output_item.added", "response.output_item.done"):
            item = event.get("item")
            if not isinstance(index, int) or not isinstance(item, dict):
                return False
            return self._place(index, item)
        elif isinstance(kind, str) and kind.endswith(DELTA):
            part, piece = PIECES.get(kind), event.get("delta")
            if part == "arguments" and isinstance(piece, dict):
                piece = arguments_text(piece)
            if not isinstance(index, int) or index not in self._open:
                return False
            if part is None or not isinstance(piece, str):
                return False
            self._open[index].pieces.setdefault(part, []).append(piece)
        return True

    def _place(self, index: int, item: JsonObject) -> bool:
        """An item, which is the one of its index unless both are calls, and two of them."""
        former = self._open.get(index)
        ids = {text(one.get("call_id")) for one in (item, *([former.item] if former else ()))}
        if former is not None and (None in ids or len(ids) == 1):
            former.item, former.pieces = item, {}
            return True
        if len(self._items) >= bounds.PARTS:
            return False
        self._open[index] = ItemParts(index, item)
        self._items.append(self._open[index])
        return True

    def response(self) -> JsonObject:
        if not self._response and self.finish is None:
            return {}  # no event of a response came
        items = [_fill_item(one.item, one.pieces) for one in sorted(self._items, key=lambda one: one.index)]
        output = listed(self._response.get("output")) or items
        status = "incomplete" if self.finish == ABORT else self._response.get("status")
        return {**self._response, "object": "response", "status": status, "output": output}


def _fill_item(item: JsonObject, pieces: Mapping[str, list[str]]) -> JsonObject:
    """An item that was not whole, with the pieces that came for it."""
    out = dict(item)
    for part, words in ((part, "".join(texts)) for part, texts in pieces.items()):
        match part:
            case "text":
                _add(out, "content", {"type": "output_text", "text": words, "annotations": []})
            case "refusal":
                _add(out, "content", {"type": "refusal", "refusal": words})
            case "summary":
                _add(out, "summary", {"type": "summary_text", "text": words})
            case "thought":
                _add(out, "content", {"type": "reasoning_text", "text": words})
            case _:
                out[part] = (text(item.get(part)) or "") + words
    return out


def _add(item: JsonObject, name: str, part: JsonObject) -> None:
    item[name] = [*listed(item.get(name)), part]
