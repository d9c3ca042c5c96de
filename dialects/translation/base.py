"""The seam between what a client asks in its API and an upstream that speaks another one.

A sibling writes an `Ask` as a request of its API, and hears the reply: whole, or event by event.

Invariants: what the API has no words for is refused with the field that asked for it, unless it is a label or a hint
alone (a seed, a user, how much to think); nothing that an upstream says raises anything but EngineError; parts are
heard in the order in which the upstream said them, text and thoughts as they come, calls of tools when they are
whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from millrace.dialects import shape
from millrace.dialects.answers import WholeAnswer, error_in
from millrace.dialects.base import Dialect
from millrace.dialects.conversation import Ask, ForcedCalls, Part, Text, Thinking, ToolUse, unsupported_error
from millrace.dialects.reading.events import ReplyEvents
from millrace.dialects.reading.reader import ROOT
from millrace.dialects.rendering.base import Message
from millrace.schemas.json_values import Json, JsonObject


@dataclass
class ReplyFacts:
    """What an upstream says of a reply beside its parts. `usage`: tokens of prompt, completion and cache; `finish`:
    OpenAI's finish reason; `stop`: the stop string that ended it."""

    id: str = ""
    usage: tuple[int, int, int] = (0, 0, 0)
    finish: str | None = None
    stop: str | None = None


class ReplyListener(ReplyEvents):
    """A streamed reply while it comes. `told` is what is known so far, `closing` whether the reply is at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.told = ReplyFacts()
        self._heard: list[Part] = []

    def hear(self, data: bytes) -> list[Part]:
        """What more bytes of the stream say."""
        self.size = 0  # what was heard is not kept
        self.feed(data)
        parts, self._heard = self._heard, []
        return parts

    def end(self) -> list[Part]:
        """What is left to say where the stream came to its end."""
        return []

    def response(self) -> JsonObject:
        return {}  # nothing is put together again


class Translator(ABC):
    """One API of upstreams. `headers`: those that it asks for."""

    dialect: Dialect
    headers: ClassVar[Mapping[str, str]] = {}

    @property
    def path(self) -> str:
        """Of its calls, below an upstream's base url."""
        return self.dialect.path.removeprefix(ROOT)

    @property
    def name(self) -> str:
        """In `speaks`."""
        return self.dialect.name

    @abstractmethod
    def request(self, ask: Ask) -> JsonObject:
        """The request's fields. Raises ApiError 400 for what cannot be said in this API."""

    @abstractmethod
    def whole(self, response: Mapping[str, Json]) -> tuple[WholeAnswer, str | None]:
        """A whole answer, and the stop string that ended it where the API says so."""

    @abstractmethod
    def listener(self) -> ReplyListener:
        """What hears a streamed reply."""

    def error(self, body: bytes) -> str:
        """What a refusal says, "" for one in no known shape."""
        return error_in(shape.object_in(body) or {})


def refuse(ask: Ask, api: str, fields: Mapping[str, bool]) -> None:
    """Raises ApiError 400 for the first field, by its name in `fields`, that is asked for and that the API lacks."""
    for param, is_asked in fields.items():
        if is_asked:
            raise unsupported_error(param, f"the upstream of {ask.model!r} speaks {api}, which has nothing like it")


def functions(ask: Ask, *, by_choice: bool = False) -> list[Mapping[str, Json]] | None:
    """The functions that are offered, with `strict` where that is asked, None where there are none; of those among
    which the reply must choose only these, where `by_choice`. Raises ApiError 400 for a tool that is none."""
    for at, tool in enumerate(ask.tools or ()):
        if not isinstance(tool.get("function"), dict):
            raise unsupported_error(f"tools[{at}]", "only functions can be offered to an upstream of another API")
    names = ask.choice.names if by_choice and isinstance(ask.choice, ForcedCalls) else ()
    offers = [_strict(tool["function"], ask) for tool in ask.tools or ()]
    return [function for function in offers if not names or function.get("name") in names] or None


def _strict(function: Mapping[str, Json], ask: Ask) -> Mapping[str, Json]:
    name = function.get("name")
    strictness = {"strict": True} if isinstance(name, str) and name in ask.strict_tools else {}
    return {**{field: value for field, value in function.items() if field != "strict"}, **strictness}


def parts_of(answer: WholeAnswer) -> list[Part]:
    """What the first choice of an answer says: thoughts, text, calls."""
    if not answer.choices:
        return []
    message = answer.choices[0].message
    out: list[Part] = []
    if thoughts := message.get("reasoning_content"):
        out.append(Thinking(thoughts))
    if content := message.get("content"):
        out.append(Text(content))
    return [*out, *uses(message.get("tool_calls") or ())]


def uses(calls: Sequence[Message]) -> list[Part]:
    """Calls of tools as messages of chat completions hold them, as parts. Servers that write no arguments mean none."""
    return [ToolUse(call["id"], call["function"]["name"], call["function"]["arguments"] or "{}") for call in calls]
