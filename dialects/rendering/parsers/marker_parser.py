"""Replies whose thoughts and calls stand between tokens of their own, `<think>` and `<tool_call>` or what a form has.

Replies are split here while they arrive, and each block of calls is read by the form. In Hermes form, what is a thought
and what is a call is settled at the end by the `renderers` package, which reads the whole reply.

Invariants: markers count only as the tokenizer's own tokens, never as text that looks like them; a call drafted in
thoughts that end is a thought, in thoughts that never end a call; a block that is no sound call is handed to the client
as the text that it is; fed token by token or at once, the reply is the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from renderers.base import ToolCallParseStatus
from renderers.parsing import parse_qwen3
from renderers.reasoning import prompt_ends_in_reasoning
from tokenizers.decoders import DecodeStream

from millrace.dialects.rendering.base import FormMarks, ParsedReply, Parser, ReplyDelta, ToolCall
from millrace.dialects.rendering.forms.base import ArgumentsDraft, Form, Schemas, named
from millrace.dialects.rendering.forms.hermes import HERMES, arguments_of, sampled_call
from millrace.dialects.rendering.parsers.stops import StopCutter
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.schemas import bounds

logger = logging.getLogger(__name__)

THINK, DRAFT, TEXT, CALL, END = "think", "draft", "text", "call", "done"
OPENING = 16
NO_TOKEN = -1

Read: TypeAlias = Callable[[Sequence[int]], Any]
"""the package's reading of a whole reply: its ParsedResponse"""


class Markers:
    """The ids of one tokenizer's markers in a form of calls, or in none; None where it has no such token."""

    def __init__(self, tokenizer: ChatTokenizer, form: Form | None = HERMES) -> None:
        self.form = form
        calls = (None, None) if form is None else (form.open, form.close)
        self.call, self.call_end = (self._id(tokenizer, token) for token in calls)
        think = HERMES.think if form is None else form.think
        self.think, self.think_end = (self._id(tokenizer, token) for token in think)
        self.head = "" if form is None else form.head

    @property
    def tools(self) -> bool:
        """Whether this tokenizer can write tool calls in this form."""
        form = self.form
        return form is not None and self.call is not None and (self.call_end is not None or form.close is None)

    @staticmethod
    def _id(tokenizer: ChatTokenizer, token: str | None) -> int | None:
        return None if token is None else tokenizer.core.token_to_id(token)


class MarkedParser(Parser):
    """`tools`: the schemas of those that the request offered; None: it offered none, so that a tool call is text.
    `thinking`: whether the prompt already opened the thoughts; `stop_ids`: what ends a reply, else the tokenizer's;
    `read`: the family's own reading of a whole reply in Hermes form, else the one of any tokenizer with these markers;
    `trim`: whether white space around thoughts and content belongs to the form."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        markers: Markers,
        *,
        tools: Schemas | None,
        thinking: bool,
        stop: Sequence[str],
        stop_ids: frozenset[int] | None = None,
        read: Read | None = None,
        trim: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._markers = markers
        self._schemas = tools or {}
        self._tools = tools is not None and markers.tools
        self._head = markers.head
        self._unsure = ""
        """thoughts so far, as long as they may be no more than `_head`"""
        self._state = THINK if thinking else TEXT
        self._fresh = True
        self._thought = thinking
        self._prefilled = thinking
        self._stop_ids = tokenizer.stop_ids if stop_ids is None else stop_ids
        self._read = read if self._tools else None
        self._trim = trim
        self._stops = StopCutter(stop)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._said = 0
        self._held = ""
        self._begun = False
        self._draft: list[int] = []
        self._all: list[int] = []
        self._marked = thinking
        self._turning = {markers.call, markers.think}
        """ids that may end a stretch of text"""
        self._call: ArgumentsDraft | None = None
        """the call that is being sampled"""
        self._drafted = 0
        """tokens of it that were looked at"""
        self._reply = ParsedReply()

    @property
    def reply(self) -> ParsedReply:
        return self._reply

    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]:
        out: list[ReplyDelta] = []
        stops, step, core, turning = self._stop_ids, self._stream.step, self._tokenizer.core, self._turning
        for id in ids:
            if self._state is TEXT and id not in stops and id not in turning:
                # What nearly every token is, with as little work as there can be.
                self._all.append(id)
                self._ids.append(id)
                if piece := step(core, id):
                    self._said += len(piece)
                    self._say(piece, out)
                continue
            if self._state is END or id in stops:
                self._close(out)
                self._state = END
                break
            self._all.append(id)
            self._token(id, out)
            step = self._stream.step
        if self._state is CALL:
            self._sketch(out)
        return self._reply.take(out)

    def finish(self) -> list[ReplyDelta]:
        out: list[ReplyDelta] = []
        self._close(out)
        self._state = END
        self._reply.take(out)
        if self._marked and self._markers.form is HERMES and not self._stops.stopped:
            out += self._settle()
        return out

    def whole(self, ids: Sequence[int]) -> list[ReplyDelta]:
        markers = self._markers
        if self._thought or markers.think in ids or (self._tools and markers.call in ids):
            return super().whole(ids)
        # Nothing but text, as most replies are: one decoding instead of one a token.
        end = next((at for at, id in enumerate(ids) if id in self._stop_ids), len(ids))
        text = self._stops.feed(self._tokenizer.decode(ids[:end], skip_special_tokens=True)) + self._stops.finish()
        if self._trim:
            text = text.strip()
        elif self._tools:
            text = text.lstrip()
        self._state = END
        return self._reply.take([ReplyDelta(content=text)] if text else [])

    def _sketch(self, out: list[ReplyDelta]) -> None:
        """Say what is certain of the arguments of the call that is open."""
        form = self._markers.form
        if self._call is None:
            count = len(self._reply.calls) + sum(delta.call is not None for delta in out)
            if form is None or form.named is None or count >= bounds.CALLS:
                return
            self._call, self._drafted = ArgumentsDraft(form.named), 1
            self._stream = DecodeStream(skip_special_tokens=False)
        ids, self._drafted = self._ids[self._drafted :], len(self._ids)
        text = "".join(self._stream.step(self._tokenizer.core, id) or "" for id in ids)
        if arguments := self._call.add(text):
            out.append(ReplyDelta(draft=ToolCall(self._call.name, arguments)))

    def _token(self, id: int, out: list[ReplyDelta]) -> None:
        markers = self._markers
        if self._state is CALL:
            self._ids.append(id)
            if id == markers.call_end:
                self._block(out)
        elif self._state in (THINK, DRAFT) and id == markers.think_end:
            self._text_ends(out)
            if self._draft:
                self._think(self._tokenizer.decode(self._draft), out)
            self._drop_holds()
            self._state, self._draft = TEXT, []
        elif self._state is DRAFT:
            self._draft.append(id)
        elif self._tools and id == markers.call:
            self._marked = True
            self._text_ends(out, before_call=True)
            if self._state is THINK:
                self._state, self._draft = DRAFT, [id]
            else:
                self._state, self._ids, self._call = CALL, [id], None
        elif self._state is THINK and id == markers.think:
            self._text_ends(out)
        elif self._state is TEXT and id == markers.think and not self._thought and self._nothing_yet():
            self._restart()
            self._state, self._thought, self._marked = THINK, True, True
            self._held, self._begun = "", False
        else:
            self._ids.append(id)
            piece = self._stream.step(self._tokenizer.core, id)
            if piece:
                self._said += len(piece)
                self._say(piece, out)

    def _nothing_yet(self) -> bool:
        """Whether nothing but white space came, bytes of unfinished characters included."""
        return self._fresh and not self._tokenizer.decode(self._ids).strip()

    def _say(self, piece: str, out: list[ReplyDelta]) -> None:
        if self._state is THINK:
            self._think(piece, out)
            return
        if self._stops.stops:
            piece = self._stops.feed(piece)
        if self._fresh and piece.strip():
            self._fresh = False
        if self._tools or self._thought or self._trim:
            # White space around tool calls and after the thoughts belongs to the form, not to the content.
            piece = self._held + piece
            if not self._begun:
                piece = piece.lstrip()
            cut = len(piece.rstrip()) if self._tools or self._trim else len(piece)
            piece, self._held = piece[:cut], piece[cut:]
        if piece:
            self._begun = True
            out.append(ReplyDelta(piece))

    def _think(self, piece: str, out: list[ReplyDelta]) -> None:
        if self._head:
            self._unsure += piece
            if self._head.startswith(self._unsure) and self._unsure != self._head:
                return  # it may still be the whole of what opens the thoughts, or their first words
            piece = self._unsure.removeprefix(self._head)
            self._head = self._unsure = ""
        if self._trim:
            piece = self._held + piece
            piece = piece if self._begun else piece.lstrip()
            cut = len(piece.rstrip())
            piece, self._held = piece[:cut], piece[cut:]
        if piece:
            self._begun = True
            out.append(ReplyDelta(reasoning=piece))

    def _drop_holds(self) -> None:
        """Thoughts end: what was held of them belongs to the form, and the content has not begun."""
        self._held, self._begun = "", False

    def _text_ends(self, out: list[ReplyDelta], *, before_call: bool = False) -> None:
        """Say what the byte decoder and the holds still keep, then begin a new stretch of text."""
        rest = self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._said :] if self._ids else ""
        if rest:
            self._say(rest, out)
        if self._state is THINK and self._unsure:
            thoughts, self._head, self._unsure = self._unsure, "", ""
            self._think(thoughts, out)
        if self._state is TEXT:
            tail = self._stops.finish()
            if tail:
                self._begun = True
            if not before_call and self._begun and (tail or not self._trim):
                tail = self._held + tail
            if tail:
                out.append(ReplyDelta(content=tail))
            self._held = ""
        self._restart()

    def _restart(self) -> None:
        self._stream, self._ids, self._said = DecodeStream(skip_special_tokens=True), [], 0
        self._call = None

    def _block(self, out: list[ReplyDelta]) -> None:
        calls = self._calls()
        count = len(self._reply.calls) + sum(delta.call is not None for delta in out)
        if calls and count + len(calls) <= bounds.CALLS:
            out += [ReplyDelta(call=call) for call in calls]
        else:
            self._as_text(out)
        self._state, self._fresh = TEXT, False
        self._restart()

    def _calls(self) -> list[ToolCall]:
        """The calls of a block that ended; none where it holds anything else."""
        form = self._markers.form
        assert form is not None
        assert form.read is not None
        inner = self._ids[1:] if form.close is None else self._ids[1:-1]
        try:
            return form.read(self._tokenizer.decode(inner), self._schemas)
        except (ValueError, RecursionError):
            return []

    def _as_text(self, out: list[ReplyDelta]) -> None:
        self._begun = True
        out.append(ReplyDelta(content=self._tokenizer.decode(self._ids)))

    def _close(self, out: list[ReplyDelta]) -> None:
        if self._state is DRAFT:
            # Thoughts that never end are ended by the call in them.
            draft, self._draft, self._state = self._draft, [], TEXT
            self._drop_holds()
            for id in draft:
                self._token(id, out)
        if self._state is CALL and self._markers.call_end is None:
            self._block(out)
        elif self._state is CALL:
            self._as_text(out)
        elif self._state is not END:
            self._text_ends(out)

    def _generic_read(self, ids: Sequence[int]) -> Any:
        """The package's Hermes parser knows no family: any tokenizer with the markers will do."""
        markers = self._markers
        return parse_qwen3(
            self._tokenizer,
            list(ids),
            stop_ids=set(self._stop_ids),
            tool_call_id=markers.call if self._tools else NO_TOKEN,
            tool_call_end_id=markers.call_end if self._tools else NO_TOKEN,
            reasoning_end_id=markers.think_end,
            prefilled_thinking=self._prefilled,
        )

    def _settle(self) -> list[ReplyDelta]:
        """Compare the calls, and whether there are thoughts, with the package's reading of the whole reply; where these
        differ, its reading is recorded, and calls that it alone has are streamed now."""
        response = reading(self._read or self._generic_read, self._all)
        if response is None:
            return []
        calls = [call for attempt in response.tool_calls if (call := as_call(attempt)) is not None][: bounds.CALLS]
        reply = self._reply
        has_thoughts = bool((reply.reasoning or "").strip())
        if calls == reply.calls and has_thoughts == bool((response.reasoning_content or "").strip()):
            return []
        logger.warning("a reply was split otherwise than it reads as a whole: %d tokens", len(self._all))
        late_calls = [ReplyDelta(call=call) for call in calls if call not in reply.calls]
        self._reply = ParsedReply(response.content or None, response.reasoning_content, calls)
        return late_calls


def opens_thoughts(tokenizer: ChatTokenizer, markers: Markers, prompt: Sequence[int], stop_ids: frozenset[int]) -> bool:
    """Whether the prompt already opened the thoughts."""
    if markers.form is not None and markers.form.think != HERMES.think:
        return markers.think in prompt[-OPENING:] and markers.think_end not in prompt[-OPENING:]
    # The library reads the whole prompt; a template that opens the thoughts does so in its last few tokens.
    return markers.think in prompt[-OPENING:] and prompt_ends_in_reasoning(
        tokenizer, list(prompt), stop_ids=set(stop_ids)
    )


def marks_of(tokenizer: ChatTokenizer, markers: Markers, prompt: Sequence[int], stop_ids: frozenset[int]) -> FormMarks:
    """The marks of a form whose replies are read here, at this prompt."""
    calls = (markers.call, markers.call_end) if markers.form is HERMES else (None, None)
    marks = *calls, markers.think, markers.think_end, stop_ids
    if opens_thoughts(tokenizer, markers, prompt, stop_ids):
        return FormMarks(*marks, "open")
    tail = list(prompt[-OPENING:])
    turn = next((tail[at + 1 :] for at in range(len(tail) - 1, -1, -1) if tail[at] in stop_ids), tail)
    return FormMarks(*marks, "closed" if markers.think_end in turn else "free")


def reading(read: Callable[[Sequence[int]], Any], ids: Sequence[int]) -> Any:
    """What the package reads in a reply; None where what the model wrote ends its parser instead."""
    try:
        return read(ids)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        logger.warning("a reply of %d tokens stays text: %s: %s", len(ids), type(error).__name__, error)
        return None


def as_call(attempt: Any) -> ToolCall | None:
    """A sound call as the package parsed it; None for one that is not: without a name, or with one that is too long, or
    with text that is no Unicode."""
    if attempt.status != ToolCallParseStatus.OK or not isinstance(attempt.name, str) or not attempt.name:
        return None
    try:
        return sampled_call(attempt.raw) or named(attempt.name, arguments_of(attempt.raw, attempt.arguments))
    except (ValueError, RecursionError):
        return None
