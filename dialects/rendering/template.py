"""Rendering by the model's own chat template, for any model, with a bridge of ours.

The bridge compares what the template writes with and without the new messages: as long as the text of the past is a
prefix of both, what the new messages add is the difference, and only that is tokenized, behind the ids as they were
sampled. A template that rewrites the past (drops old thoughts, moves the system text) is refused with that reason.

Invariants: the cut always lies right before the token that ends the reply, where tokenization starts afresh; an end
token that the engine did not sample (a length limit, a stop string) is added as context, never as an output; one bridge
is made as of one moment, so that no midnight comes between what it compares; tools are offered only where the calls
that the template writes are read back as calls."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from hashlib import blake2b

from millrace.dialects.rendering.base import (
    NO_OPTIONS,
    FormMarks,
    Message,
    NoContinuation,
    Options,
    Parser,
    Renderer,
    RenderError,
    Tools,
)
from millrace.dialects.rendering.form_writer import CACHE_ENTRIES, USER, FormWriter
from millrace.dialects.rendering.messages import Style, to_template
from millrace.dialects.rendering.parsers.choose import parser_of
from millrace.dialects.rendering.parsers.marker_parser import Markers, marks_of
from millrace.dialects.rendering.parsers.plain_parser import PlainParser
from millrace.dialects.rendering.template_form import CALL, RESULT, TOOLS, manner_of
from millrace.dialects.rendering.tokenizer import ChatTokenizer

PROBE: list[Message] = [
    {"role": "system", "content": "a"},
    USER,
    {"role": "assistant", "content": "b", "reasoning_content": "c"},
    USER,
    {**CALL, "reasoning_content": "d"},
    RESULT,
]
"""a conversation with all that an option may be about"""


class TemplateRenderer(Renderer):
    """`tokenizer_hash` and `template_hash` override what the tokenizer computes of its own files."""

    name = "template"

    def __init__(
        self, tokenizer: ChatTokenizer, *, tokenizer_hash: str | None = None, template_hash: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._manner = manner_of(tokenizer, self._write_in_style)
        self.markers = Markers(tokenizer, self._manner.form)
        self.tokenizer_hash = tokenizer_hash or tokenizer.hash
        self.template_hash = template_hash or tokenizer.template_hash
        self.stop_ids = tokenizer.stop_ids
        self._ends = tuple(token for id in self.stop_ids if (token := tokenizer.core.id_to_token(id)))
        self._altering: dict[bytes, bool] = {}
        self._written = FormWriter(lambda messages, tools: self._text(messages, tools, generate=True))

    def limit_to(self, tokens: int) -> None:
        self.tokenizer.segments.limit = tokens

    def reads(self, options: Options) -> Options:
        names = self.tokenizer.names
        return {name: value for name, value in options.items() if name in names and self._alters(name, value)}

    def render(self, messages: Sequence[Message], tools: Tools, options: Options = NO_OPTIONS) -> list[int]:
        self._check(tools)
        messages = self._written.roles(messages)
        text = self._text(messages, tools, generate=True, options=self.reads(options))
        ids = self.tokenizer.encode(text)  # before the check: what is too long is refused for that
        self._written.check(messages, tools)
        return ids

    def conversation_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        self._check(tools)
        return self.tokenizer.encode(self._text(self._written.roles(messages), tools, generate=False))

    def bridge(
        self,
        stored_ids: Sequence[int],
        past: Sequence[Message],
        additions: Sequence[Message],
        tools: Tools,
        options: Options = NO_OPTIONS,
    ) -> list[int] | NoContinuation:
        if not stored_ids:
            return NoContinuation("nothing is stored")
        past, additions, now = self._written.roles(past), self._written.roles(additions), datetime.now()
        options = self.reads(options)
        try:
            prompt = self._text(past[:-1], tools, generate=True, now=now, options=options)
            before = self._text(past, tools, generate=False, now=now, options=options)
            after = self._text([*past, *additions], tools, generate=True, now=now, options=options)
        except RenderError as error:
            return NoContinuation(f"the template cannot continue: {error}")
        if not before.startswith(prompt):
            return NoContinuation("the template writes replies in another way than it asks for them")
        try:
            self._written.check([USER, *past[-1:], *additions], tools, since=2)
        except RenderError as error:
            return NoContinuation(str(error))
        at = self._end(before, after, len(prompt))
        if isinstance(at, NoContinuation):
            return at
        first, *rest = self.tokenizer.encode(after[at:])
        if first not in self.stop_ids:
            return NoContinuation("the tokenizer does not keep the end token apart")
        if stored_ids[-1] not in self.stop_ids:
            return [first, *rest]
        if stored_ids[-1] != first:
            return NoContinuation("the reply ended with another token than the template writes")
        return rest

    def _end(self, before: str, after: str, reply: int) -> int | NoContinuation:
        """Where the end token of the reply stands in `after`, which goes on from `before`; the reply begins at `reply`.
        Some templates write none, and what comes next begins with it; some write more behind it where nothing comes."""
        ends = sorted(
            ((at, end) for end in self._ends if (at := before.rfind(end, reply)) >= 0), key=lambda place: -place[0]
        )
        for at, end in ends:
            if after.startswith(before[: at + len(end)]):
                return at
            if not self._only_ends(before[at:]):
                break
        if not after.startswith(before):
            return NoContinuation("the template rewrites earlier messages")
        if after.startswith(self._ends, len(before)):
            return len(before)
        return NoContinuation("the template does not end replies with the end token")

    def _alters(self, name: str, value: object) -> bool:
        """Whether an option changes what the template writes; the value that it would take by itself does not."""
        key = blake2b(f"{name} {value!r}".encode(errors="replace"), digest_size=16).digest()
        has_effect, now = self._altering.get(key), datetime.now()
        if has_effect is None:
            try:
                has_effect = any(
                    self._text(PROBE, tools, generate=True, now=now, options={name: value})
                    != self._text(PROBE, tools, generate=True, now=now)
                    for tools in (None, TOOLS)
                )
            except RenderError:
                has_effect = True
            if len(self._altering) >= CACHE_ENTRIES:
                self._altering = {}
            self._altering[key] = has_effect
        return has_effect

    def _only_ends(self, text: str) -> bool:
        for end in self._ends:
            text = text.replace(end, "")
        return not text.strip()

    def parser(self, prompt: Sequence[int], tools: Tools, stop: Sequence[str] = ()) -> Parser:
        return parser_of(self.tokenizer, self.markers, prompt, tools, stop, self.stop_ids)

    def plain_parser(self, stop: Sequence[str] = ()) -> Parser:
        return PlainParser(self.tokenizer, self.stop_ids, stop)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode_whole(ids)

    def marks(self, prompt: Sequence[int]) -> FormMarks | None:
        if self.markers.form is not None and self.markers.form.channels:
            return None
        return marks_of(self.tokenizer, self.markers, prompt, self.stop_ids)

    def text(self, token: int) -> str:
        return self.tokenizer.text(token)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)

    def _check(self, tools: Tools) -> None:
        if tools and self._manner.why:
            raise RenderError(f"tools are not supported with this model: {self._manner.why}")

    def _text(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        generate: bool,
        now: datetime | None = None,
        options: Options = NO_OPTIONS,
    ) -> str:
        objects = to_template(messages, self._manner.style)
        return self.tokenizer.render_text(objects, tools or None, generate=generate, now=now, **options)

    def _write_in_style(self, messages: list[Message], tools: Tools, generate: bool, style: Style) -> str:
        return self.tokenizer.render_text(to_template(messages, style), tools or None, generate=generate)
