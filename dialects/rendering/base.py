"""The rendering seam: messages to token ids, stored ids to the next prompt, sampled ids to a message.

Invariants: `render` and `conversation_ids` alone tokenize whole conversations; `bridge` never changes a stored id, it
only says what comes after, or refuses with the reason; a parser fed token by token gives the same reply as one fed at
once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from millrace.infra.errors import GatewayError

Message: TypeAlias = Mapping[str, Any]
"""role, content (str), tool_calls with arguments as JSON text, tool_call_id, name, reasoning_content"""
RAW = "raw"
"""the key of a message that is a prompt itself, which no template writes; no client's message has it"""
Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
"""OpenAI's tool list; None and [] differ for some templates"""


Options: TypeAlias = Mapping[str, Any]
"""what a request says to the chat template, by the template's own names"""
NO_OPTIONS: Options = {}


class RenderError(GatewayError):
    """The template refuses these messages; the client must change them."""


class PromptTooLong(RenderError):
    """The messages are certain to be longer than the model's context."""


class NoContinuation(NamedTuple):
    """Why stored ids cannot be continued with these messages."""

    reason: str


class ToolCall(NamedTuple):
    """A call that the model made; `arguments` is JSON text as sampled where it was sound."""

    name: str
    arguments: str


class FormMarks(NamedTuple):
    """The tokens that a form puts around calls, where it is Hermes form, and around thoughts, None where it has none,
    and what ends a reply. `thoughts`: a prompt has opened them, or closed them, or leaves them to the model."""

    call: int | None
    call_end: int | None
    think: int | None
    think_end: int | None
    stop_ids: frozenset[int]
    thoughts: Literal["open", "closed", "free"]


class ReplyDelta(NamedTuple):
    """What new tokens added to the reply: text, reasoning text, or one whole tool call. `draft`: more of the arguments
    of the call that comes next, which begins with them; where the model breaks it off, text comes in its place."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    draft: ToolCall | None = None


@dataclass(slots=True)
class ParsedReply:
    """A parsed reply. `content` None when the model only called tools."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def take(self, deltas: list[ReplyDelta]) -> list[ReplyDelta]:
        """Note what was said; returns it."""
        for delta in deltas:
            if delta.draft is not None:
                continue
            if delta.call is not None:
                self.calls.append(delta.call)
            elif delta.reasoning:
                self.reasoning = (self.reasoning or "") + delta.reasoning
            else:
                self.content = (self.content or "") + delta.content
        return deltas


class Parser(ABC):
    """Turns the sampled ids of one choice into a reply while they arrive."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]:
        """What can be said already; text that may yet turn out to be something else is held back."""

    @abstractmethod
    def finish(self) -> list[ReplyDelta]:
        """What was held back."""

    def whole(self, ids: Sequence[int]) -> list[ReplyDelta]:
        """`feed` and `finish` of a reply that came all at once."""
        return [delta for delta in [*self.feed(ids), *self.finish()] if delta.draft is None]

    @property
    @abstractmethod
    def reply(self) -> ParsedReply:
        """Everything said so far; whole after `finish`."""


class Renderer(ABC):
    """One model's way of writing conversations. Safe to share between threads."""

    name: str
    """of its form: `template`, or a family"""
    tokenizer_hash: str
    """sha256 hex"""
    template_hash: str
    """sha256 hex"""
    stop_ids: frozenset[int]
    """ids that end a reply"""

    @abstractmethod
    def limit_to(self, tokens: int) -> None:
        """From now on `render` and `bridge` may raise PromptTooLong for what is certain to have more tokens."""

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Tools, options: Options = NO_OPTIONS) -> list[int]:
        """The prompt of a conversation, ready for the next reply. Raises RenderError."""

    @abstractmethod
    def conversation_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The conversation with its last reply in, asking for no other. Raises RenderError."""

    @abstractmethod
    def bridge(
        self,
        stored_ids: Sequence[int],
        past: Sequence[Message],
        additions: Sequence[Message],
        tools: Tools,
        options: Options = NO_OPTIONS,
    ) -> list[int] | NoContinuation:
        """The ids between `stored_ids` (a prompt and its reply, as sampled) and the next reply.

        `past` are the messages behind `stored_ids`, the reply last; `additions` what the client added."""

    @abstractmethod
    def reads(self, options: Options) -> Options:
        """Those of a request's options that this form has; the others have no effect."""

    @abstractmethod
    def parser(self, prompt: Sequence[int], tools: Tools, stop: Sequence[str] = ()) -> Parser:
        """A parser for one reply to `prompt`; text is cut before the first of the `stop` strings."""

    @abstractmethod
    def plain_parser(self, stop: Sequence[str] = ()) -> Parser:
        """A parser for a reply to a prompt that no template wrote: all of it is text."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of text; special tokens written in it are recognised, none are added. Raises RenderError."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. Raises RenderError for an id that is none of the tokenizer's."""

    def marks(self, prompt: Sequence[int]) -> FormMarks | None:
        """By which tokens a reply to `prompt` can be held to a shape; None where the form is not known so well."""
        return None

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, for log-probabilities on the wire."""

    @abstractmethod
    def text(self, token: int) -> str:
        """One token as text, for log-probabilities on the wire."""
