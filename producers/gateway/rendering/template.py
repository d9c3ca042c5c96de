"""Rendering by the model's own chat template, for any model, with a bridge of ours.

The bridge compares what the template writes with and without the new messages: as long as the text of the past is a
prefix of both, what the new messages add is the difference, and only that is tokenized, behind the ids as they were
sampled. A template that rewrites the past (drops old thoughts, moves the system text) is refused with that reason.

Invariants: the cut always lies right behind the token that ends the reply, where tokenization starts afresh; an end
token that the engine did not sample (a length limit, a stop string) is added as context, never as an output."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.producers.gateway.rendering.base import (
    Marks,
    Message,
    NoContinuation,
    Parser,
    Renderer,
    RenderError,
    Tools,
)
from millrace.producers.gateway.rendering.hermes import HermesParser, Markers, marks_of, opens_thoughts
from millrace.producers.gateway.rendering.messages import decoded
from millrace.producers.gateway.rendering.tokenizer import ChatTokenizer
from millrace.producers.gateway.rendering.written import USER, Written


class TemplateRenderer(Renderer):
    """`tokenizer_hash` and `template_hash` override what the tokenizer computes of its own files."""

    name = "template"

    def __init__(
        self, tokenizer: ChatTokenizer, *, tokenizer_hash: str | None = None, template_hash: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.markers = Markers(tokenizer)
        self.tokenizer_hash = tokenizer_hash or tokenizer.hash
        self.template_hash = template_hash or tokenizer.template_hash
        self.stop_ids = tokenizer.stop_ids
        self._written = Written(lambda messages, tools: self._text(messages, tools, generate=True))

    def limit_to(self, tokens: int) -> None:
        self.tokenizer.segments.limit = tokens

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        self._check(tools)
        messages = self._written.roles(messages)
        text = self._text(messages, tools, generate=True)
        ids = self.tokenizer.encode(text)  # before the check: what is too long is refused for that
        self._written.check(messages, tools)
        return ids

    def told(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        self._check(tools)
        return self.tokenizer.encode(self._text(self._written.roles(messages), tools, generate=False))

    def bridge(
        self, stored: Sequence[int], past: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | NoContinuation:
        if not stored:
            return NoContinuation("nothing is stored")
        close = self.tokenizer.eos_token
        if close is None or self.tokenizer.eos_token_id is None:
            return NoContinuation("the tokenizer names no end token")
        ended = bool(stored) and stored[-1] in self.stop_ids
        if ended and stored[-1] != self.tokenizer.eos_token_id:
            return NoContinuation("the reply ended with another token than the template writes")
        past, new = self._written.roles(past), self._written.roles(new)
        try:
            prompt = self._text(past[:-1], tools, generate=True)
            before = self._text(past, tools, generate=False)
            after = self._text([*past, *new], tools, generate=True)
        except RenderError as error:
            return NoContinuation(f"the template cannot continue: {error}")
        if not before.startswith(prompt):
            return NoContinuation("the template writes replies in another way than it asks for them")
        if not after.startswith(before):
            return NoContinuation("the template rewrites earlier messages")
        try:
            self._written.check([USER, *past[-1:], *new], tools, since=2)
        except RenderError as error:
            return NoContinuation(str(error))
        at = before.rfind(close, len(prompt))
        if at < 0:
            return NoContinuation("the template does not end replies with the end token")
        first, *rest = self.tokenizer.encode(close + before[at + len(close) :] + after[len(before) :])
        if first != self.tokenizer.eos_token_id:
            return NoContinuation("the tokenizer does not keep the end token apart")
        return rest if ended else [first, *rest]

    def parser(self, prompt: Sequence[int], tools: Tools, stop: Sequence[str] = ()) -> Parser:
        thinking = opens_thoughts(self.tokenizer, self.markers, prompt, self.stop_ids)
        return HermesParser(self.tokenizer, self.markers, tools=bool(tools), thinking=thinking, stop=stop)

    def marks(self, prompt: Sequence[int]) -> Marks | None:
        return marks_of(self.tokenizer, self.markers, prompt, self.stop_ids)

    def text(self, token: int) -> str:
        return self.tokenizer.text(token)

    def _check(self, tools: Tools) -> None:
        if tools and not self.markers.tools:
            raise RenderError(
                "tools are not supported with this model: its tokenizer has no <tool_call> and </tool_call> tokens, "
                "and Hermes form is the only one that this gateway parses"
            )

    def _text(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> str:
        return self.tokenizer.render_text(decoded(messages), tools or None, generate=generate)
