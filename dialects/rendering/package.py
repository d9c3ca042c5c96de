"""Rendering by the `renderers` package, for the families of models that it knows.

The package writes conversations, bridges turns and reads replies; this side adapts its surface. Families whose tool
calls are in Hermes form stream through the splitter of `hermes`, all others are read when the reply is whole.

Invariants: a bridge is taken only if it begins with exactly the stored ids; neither torch nor transformers is loaded,
the package drives our tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from renderers import Renderer as Package
from renderers import config_from_name, create_renderer

from millrace.dialects.rendering.base import (
    NO_OPTIONS,
    FormMarks,
    Message,
    NoContinuation,
    Options,
    ParsedReply,
    Parser,
    PromptTooLong,
    Renderer,
    RenderError,
    ReplyDelta,
    Tools,
)
from millrace.dialects.rendering.form_writer import FormWriter
from millrace.dialects.rendering.forms.base import schemas_of
from millrace.dialects.rendering.messages import to_template
from millrace.dialects.rendering.parsers.marker_parser import (
    MarkedParser,
    Markers,
    as_call,
    marks_of,
    opens_thoughts,
    reading,
)
from millrace.dialects.rendering.parsers.plain_parser import PlainParser
from millrace.dialects.rendering.parsers.stops import StopCutter
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.errors import ConfigError

HERMES = ("qwen3", "qwen3-vl")
"""families with tool calls in Hermes form"""

USER: Message = {"role": "user", "content": "a"}
TURN: list[Message] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "name": "f", "content": "b"},
]


def has_renderer(name: str) -> bool:
    """Whether the package has a family of this name."""
    try:
        return name != "default" and config_from_name(name) is not None
    except ValueError:
        return False


def _config(tokenizer: ChatTokenizer, name: str) -> Any:
    """What the package makes a family by, as of the tokenizer's moment where its form says the day."""
    config = config_from_name(name)
    if tokenizer.as_of is not None and hasattr(config, "conversation_start_date"):
        return config.model_copy(update={"conversation_start_date": tokenizer.as_of.strftime("%Y-%m-%d")})
    return config


class PackagedRenderer(Renderer):
    """The family `name` of the package on `tokenizer`. What a request says to the template, which the package knows
    nothing of, `template` writes. Raises ConfigError when the tokenizer lacks its tokens."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        name: str,
        *,
        tokenizer_hash: str | None = None,
        template_hash: str | None = None,
        template: Renderer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self._template = template
        self.markers = Markers(tokenizer)
        try:
            self.package: Package = create_renderer(tokenizer, _config(tokenizer, name))
        except (AssertionError, ValueError, TypeError, ImportError) as error:
            raise ConfigError(
                f"renderer {name!r} does not fit this model: {error}; set [gateway] renderer to auto or template"
            ) from error
        self.tokenizer_hash = tokenizer_hash or tokenizer.hash
        self.template_hash = template_hash or tokenizer.template_hash
        self.stop_ids = tokenizer.stop_ids | frozenset(self.package.get_stop_token_ids())
        self._written = FormWriter(self._text)
        self._prompts = [ids for probe in ([USER], TURN) if (ids := self._opening(probe))]

    def limit_to(self, tokens: int) -> None:
        self.tokenizer.segments.limit = tokens

    def reads(self, options: Options) -> Options:
        return NO_OPTIONS if self._template is None else self._template.reads(options)

    def render(self, messages: Sequence[Message], tools: Tools, options: Options = NO_OPTIONS) -> list[int]:
        if self._template is not None and self.reads(options):
            return self._template.render(messages, tools, options)
        messages = self._written.roles(messages)
        ids = self._render(messages, tools, generate=True)
        self._written.check(messages, tools)
        return ids

    def conversation_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return self._render(self._written.roles(messages), tools, generate=False)

    def bridge(
        self,
        stored_ids: Sequence[int],
        past: Sequence[Message],
        additions: Sequence[Message],
        tools: Tools,
        options: Options = NO_OPTIONS,
    ) -> list[int] | NoContinuation:
        if self._template is not None and self.reads(options):
            return self._template.bridge(stored_ids, past, additions, tools, options)
        stored_ids = list(stored_ids)
        at = max((_after_last(stored_ids, opening) for opening in self._prompts), default=0)
        if not at:
            return NoContinuation("the stored tokens do not show where the reply begins")
        if any(message["role"] == "assistant" for message in additions):
            return NoContinuation("the new messages hold a reply that was not sampled here")
        additions = self._written.roles(additions)

        def go_on(messages: Sequence[Message], tools: Tools) -> list[int] | None:
            turn = self.package.bridge_to_next_turn(
                stored_ids[:at], stored_ids[at:], to_template(messages), tools=_to_list(tools)
            )
            return None if turn is None else list(turn.token_ids)

        def text(messages: Sequence[Message], tools: Tools) -> str:
            return self.tokenizer.decode((go_on(messages, tools) or stored_ids)[len(stored_ids) :])

        try:
            ids = go_on(additions, tools)
            if ids is None:
                return NoContinuation(self._why(additions))
            self._written.check(additions, tools, bridge=text)
        except PromptTooLong:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, RenderError) as error:
            return NoContinuation(f"the {self.name} renderer cannot continue: {error}")
        if ids[: len(stored_ids)] != stored_ids:
            return NoContinuation("the reply goes on behind its end token")
        return ids[len(stored_ids) :]

    def parser(self, prompt: Sequence[int], tools: Tools, stop: Sequence[str] = ()) -> Parser:
        def read(ids: Sequence[int]) -> Any:
            return self.package.parse_response(list(ids), tools=_to_list(tools), prompt_ids=list(prompt))

        if self.name not in HERMES:
            return WholeParser(self.tokenizer, read, self.stop_ids, tools=bool(tools), stop=stop)
        return MarkedParser(
            self.tokenizer,
            self.markers,
            tools=schemas_of(tools) if tools else None,
            thinking=opens_thoughts(self.tokenizer, self.markers, prompt, self.stop_ids),
            stop=stop,
            stop_ids=self.stop_ids,
            read=read,
            trim=True,
        )

    def plain_parser(self, stop: Sequence[str] = ()) -> Parser:
        return PlainParser(self.tokenizer, self.stop_ids, stop)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode_whole(ids)

    def marks(self, prompt: Sequence[int]) -> FormMarks | None:
        if self.name not in HERMES:
            return None
        return marks_of(self.tokenizer, self.markers, prompt, self.stop_ids)

    def text(self, token: int) -> str:
        return self.tokenizer.text(token)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)

    def _render(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> list[int]:
        try:
            ids: list[int] = self.package.render_ids(
                to_template(messages), tools=_to_list(tools), add_generation_prompt=generate
            )
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise RenderError(f"the {self.name} renderer cannot write these messages: {error}") from error
        return ids

    def _text(self, messages: Sequence[Message], tools: Tools) -> str:
        return self.tokenizer.decode(self._render(messages, tools, generate=True))

    def _opening(self, messages: Sequence[Message]) -> list[int]:
        """The ids that ask for a reply behind these messages; empty when they cannot be told apart."""
        try:
            prompt = self._render(messages, None, generate=True)
            conversation = self._render(messages, None, generate=False)
        except RenderError:
            return []
        return prompt[len(conversation) :] if prompt[: len(conversation)] == conversation else []

    def _why(self, messages: Sequence[Message]) -> str:
        retention = getattr(self.package, "effective_thinking_retention", "template")
        if retention == "template":
            return "the model's form rewrites earlier replies"
        if retention == "tool_cycle" and any(message["role"] == "user" for message in messages):
            return "the model's form drops earlier thoughts when the user speaks again"
        return f"the {self.name} renderer cannot prove that these messages continue the stored tokens"


class WholeParser(Parser):
    """Replies in a form that only the package can read: nothing is said before the reply is whole."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        read: Callable[[Sequence[int]], Any],
        stop_ids: frozenset[int],
        *,
        tools: bool,
        stop: Sequence[str],
    ) -> None:
        self._tokenizer = tokenizer
        self._read = read
        self._stop_ids = stop_ids
        self._tools = tools
        self._stops = StopCutter(stop)
        self._ids: list[int] = []
        self._reply = ParsedReply()

    @property
    def reply(self) -> ParsedReply:
        return self._reply

    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]:
        self._ids += ids
        return []

    def finish(self) -> list[ReplyDelta]:
        end = next((at for at, id in enumerate(self._ids) if id in self._stop_ids), len(self._ids))
        response = reading(self._read, self._ids[:end])
        if response is None:
            self._reply.content = self._tokenizer.decode(self._ids[:end], skip_special_tokens=True) or None
            return [ReplyDelta(content=self._reply.content)] if self._reply.content else []
        content = response.content
        for attempt in response.tool_calls:
            call = as_call(attempt) if self._tools else None
            if call is not None:
                self._reply.calls.append(call)
            else:
                span = attempt.token_span
                content += attempt.raw if span is None else self._tokenizer.decode(self._ids[span[0] : span[1]])
        self._reply.content = (self._stops.feed(content) + self._stops.finish()) or None
        self._reply.reasoning = response.reasoning_content or None
        deltas = [ReplyDelta(reasoning=self._reply.reasoning)] if self._reply.reasoning else []
        deltas += [ReplyDelta(content=self._reply.content)] if self._reply.content else []
        return deltas + [ReplyDelta(call=call) for call in self._reply.calls]


def _to_list(tools: Tools) -> list[Any] | None:
    return list(tools) if tools else None


def _after_last(ids: list[int], part: list[int]) -> int:
    """The place behind the last occurrence of `part`; 0 when there is none."""
    size = len(part)
    return next((at + size for at in range(len(ids) - size, -1, -1) if ids[at : at + size] == part), 0)
