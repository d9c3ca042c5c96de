"""Legacy completions of an upstream, and their stream put together again.

Invariant: memory is bounded by the bound on choices too, whatever indexes the server writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from millrace.dialects.answers import AnswerChoice, WholeAnswer, counts, listed, mapping, name, number, text
from millrace.dialects.reading.chat_assembler import usage_of
from millrace.dialects.reading.events import ReplyEvents
from millrace.dialects.reading.reader import DialectReader
from millrace.dialects.rendering.base import Message
from millrace.infra.engines.base import ABORT
from millrace.schemas import bounds
from millrace.schemas.ids import new_id
from millrace.schemas.json_values import Json, JsonObject


class CompletionsReader(DialectReader):
    """`POST /completions`."""

    def answer_in(self, response: Mapping[str, Json]) -> WholeAnswer:
        answers = [
            AnswerChoice(at, message_of(choice), name(choice.get("finish_reason")))
            for at, choice in choices_by_number(response)
        ]
        return WholeAnswer(name(response.get("id")) or new_id(), answers, counts(response))

    def assembler(self) -> ReplyEvents:
        return AssembledCompletions()


def message_of(choice: Mapping[str, Json]) -> Message:
    """The reply of a choice."""
    return {"role": "assistant", "content": text(choice.get("text")) or ""}


def choices_by_number(response: Mapping[str, Json]) -> Iterator[tuple[int, Mapping[str, Json]]]:
    """The choices of a response, the first of each number."""
    numbers = set[int]()
    for place, choice in enumerate(listed(response.get("choices"))[: bounds.CHOICES]):
        at = number(mapping(choice).get("index"), place)
        if at not in numbers:
            numbers.add(at)
            yield at, mapping(choice)


class AssembledCompletions(ReplyEvents):
    """A whole stream of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._head: JsonObject = {}
        self._said: dict[int, list[str]] = {}
        self._ends: dict[int, str | None] = {}

    def take(self, event: JsonObject) -> bool:
        self._head |= {key: event[key] for key in ("id", "model") if text(event.get(key))}
        if usage := mapping(event.get("usage")):
            self._head["usage"] = usage_of(usage)
        is_read = True
        for at, choice in enumerate(listed(event.get("choices"))):
            choice = mapping(choice)
            index = number(choice.get("index"), at)
            if index not in self._said and len(self._said) >= bounds.CHOICES:
                is_read = False
                continue
            pieces = self._said.setdefault(index, [])
            if piece := text(choice.get("text")):
                pieces.append(piece)
            self._ends[index] = text(choice.get("finish_reason")) or self._ends.get(index)
            self.closing |= self._ends[index] is not None
        return is_read

    def response(self) -> JsonObject:
        choices: list[JsonObject] = [
            {"index": index, "text": "".join(pieces), "finish_reason": self.finish or self._ends[index]}
            for index, pieces in sorted(self._said.items())
        ]
        if not choices and self.finish is None and not self._head:
            return {}  # no event of a completion came
        if not choices and self.finish == ABORT:
            choices = [{"index": 0, "text": "", "finish_reason": ABORT}]
        return {**self._head, "object": "text_completion", "choices": choices}
