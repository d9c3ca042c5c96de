"""Replies of gpt-oss: messages with a header that names a channel, and for a call its function.

`analysis` are thoughts, `final` and `commentary` are said to the user, and a message `to=functions.f` is a call, with
its arguments as JSON. A reply begins within the header, behind the prompt's `<|start|>assistant`.

Invariants: a header is never told; a call that is not sound is handed to the client as the text that it is; fed token
by token or at once, the reply is the same."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from millrace.dialects.rendering.base import ParsedReply, Parser, ReplyDelta, ToolCall
from millrace.dialects.rendering.forms.base import ArgumentsDraft, call
from millrace.dialects.rendering.forms.harmony import CALL, CHANNEL, END, MESSAGE, START
from millrace.dialects.rendering.parsers.stops import StopCutter
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.schemas import bounds

HEADER, THOUGHTS, TEXT, TOOL_CALL, BETWEEN, REPLY_END = "header", "thought", "text", "asked", "between", "done"
OPENING = 64
"""tokens at a prompt's end in which a message may have begun"""
TO = re.compile(r"to=(\S+?)(?=\s|<\||\Z)")
FUNCTIONS = "functions."


class HarmonyParser(Parser):
    """`tools`: whether the request offered any; without, a call is text."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        prompt: Sequence[int],
        *,
        tools: bool,
        stop: Sequence[str],
        stop_ids: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._stop_ids = stop_ids
        self._stops = StopCutter(stop)
        ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (START, CHANNEL, MESSAGE, END, CALL)}
        self._start, self._message = ids[START], ids[MESSAGE]
        self._ends = (ids[END], ids[CALL])
        self._state = HEADER
        self._header: list[int] = []
        self._given = 0
        """tokens of the header that the prompt has given"""
        self._ids: list[int] = []
        self._said = 0
        self._stream = DecodeStream(skip_special_tokens=True)
        self._draft: ArgumentsDraft | None = None
        """the call that is being sampled"""
        self._pieces: list[str] = []
        """what is sampled of it, and not looked at yet"""
        self._reply = ParsedReply()
        opening = list(prompt[-OPENING:])
        last = max((at for at, id in enumerate(opening) if id == self._start), default=len(opening))
        for id in opening[last + 1 :]:  # the prompt has begun the header, and maybe the message
            self._token(id, [])
        self._ids, self._stream = [], DecodeStream(skip_special_tokens=True)
        self._given = len(self._header)

    @property
    def reply(self) -> ParsedReply:
        return self._reply

    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]:
        out: list[ReplyDelta] = []
        for id in ids:
            if self._state is REPLY_END or id in self._stop_ids:
                self._end_message(out)
                self._state = REPLY_END
                break
            self._token(id, out)
        if self._state is TOOL_CALL and self._draft is not None:
            arguments, self._pieces = self._draft.add("".join(self._pieces)), []
            if arguments:
                out.append(ReplyDelta(draft=ToolCall(self._draft.name, arguments)))
        return self._reply.take(out)

    def finish(self) -> list[ReplyDelta]:
        out: list[ReplyDelta] = []
        self._end_message(out)
        self._state = REPLY_END
        rest = self._stops.finish()
        return self._reply.take([*out, *([ReplyDelta(content=rest)] if rest else [])])

    def _token(self, id: int, out: list[ReplyDelta]) -> None:
        if id == self._start or (id in self._ends and self._state is not HEADER):
            self._end_message(out)
            self._state = HEADER if id == self._start else BETWEEN
        elif self._state is HEADER and id == self._message:
            self._begin(out)
        elif self._state is HEADER:
            self._header.append(id)
        elif self._state is not BETWEEN:
            self._ids.append(id)
            piece = self._stream.step(self._tokenizer.core, id) or ""
            if self._state is TOOL_CALL:
                self._pieces.append(piece)
            else:
                self._say(piece, out)

    def _begin(self, out: list[ReplyDelta]) -> None:
        """A header is whole: its message begins."""
        header = self._tokenizer.decode(self._header)
        to, channel = TO.search(header), header.partition(CHANNEL)[2].lstrip()
        self._ids, self._said, self._stream = [], 0, DecodeStream(skip_special_tokens=True)
        if to is not None:
            self._state = TOOL_CALL
            self._stream = DecodeStream(skip_special_tokens=False)
            self._draft, self._pieces = self._draft_of(to.group(1), out), []
        elif channel.startswith("analysis"):
            self._state = THOUGHTS
            if self._reply.reasoning or any(delta.reasoning for delta in out):
                out.append(ReplyDelta(reasoning="\n\n"))
        else:
            self._state = TEXT
            if self._reply.content or any(delta.content for delta in out):
                out.append(ReplyDelta(content=self._stops.feed("\n\n")))

    def _draft_of(self, name: str, out: list[ReplyDelta]) -> ArgumentsDraft | None:
        """The call of a function that begins; None where it is none."""
        count = len(self._reply.calls) + sum(delta.call is not None for delta in out)
        if not self._tools or not name.startswith(FUNCTIONS) or count >= bounds.CALLS:
            return None
        return ArgumentsDraft(None, name.removeprefix(FUNCTIONS))

    def _say(self, piece: str, out: list[ReplyDelta]) -> None:
        self._said += len(piece)
        if self._state is THOUGHTS and piece:
            out.append(ReplyDelta(reasoning=piece))
        elif self._state is TEXT and (piece := self._stops.feed(piece)):
            out.append(ReplyDelta(content=piece))

    def _end_message(self, out: list[ReplyDelta]) -> None:
        """A message is whole, or the reply ends within it."""
        if self._state is TOOL_CALL:
            self._end_call(out)
        elif self._state in (THOUGHTS, TEXT):
            self._say(self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._said :], out)
        elif self._state is HEADER and self._header:
            header = self._tokenizer.decode(self._header[self._given :])
            if CHANNEL not in header and TO.search(header) is None and header.strip() not in ("", "assistant"):
                out.append(ReplyDelta(content=self._stops.feed(header)))  # a reply in no form at all
        self._ids, self._header, self._given = [], [], 0

    def _end_call(self, out: list[ReplyDelta]) -> None:
        header, body = self._tokenizer.decode(self._header), self._tokenizer.decode(self._ids)
        to = TO.search(header)
        draft = self._draft_of(to.group(1) if to is not None else "", out)
        try:
            if draft is None:
                raise ValueError("it is no call of a function")
            out.append(ReplyDelta(call=call(draft.name, body.strip() or "{}")))
        except (ValueError, RecursionError):
            text = self._stops.feed(self._tokenizer.decode([*self._header[self._given :], self._message, *self._ids]))
            if text:
                out.append(ReplyDelta(content=text))
