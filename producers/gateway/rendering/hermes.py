"""Replies in Hermes form: `<think>` text, text, and `<tool_call>` JSON blocks between two tokens of their own.

Invariants: markers count only as the tokenizer's own tokens, never as text that looks like them; each block is parsed
by the `renderers` package; a block that is no sound call is handed to the client as the text that it is; fed token by
token or at once, the reply is the same."""

from __future__ import annotations

import json
from collections.abc import Sequence

from renderers.base import ToolCallParseStatus
from renderers.parsers import Qwen3ToolParser
from tokenizers.decoders import DecodeStream

from producers.gateway.rendering.base import Delta, Parser, Reply, ToolCall
from producers.gateway.rendering.stops import StopCutter
from producers.gateway.rendering.tokenizer import ChatTokenizer

THINK, TEXT, CALL, DONE = "think", "text", "call", "done"


class Markers:
    """The ids of one tokenizer's markers; None where it has no such token."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.call = tokenizer.convert_tokens_to_ids("<tool_call>")
        self.call_end = tokenizer.convert_tokens_to_ids("</tool_call>")
        self.think = tokenizer.convert_tokens_to_ids("<think>")
        self.think_end = tokenizer.convert_tokens_to_ids("</think>")
        self.parser = Qwen3ToolParser(tokenizer)

    @property
    def tools(self) -> bool:
        """Whether this tokenizer can write tool calls in this form."""
        return self.call is not None and self.call_end is not None


class HermesParser(Parser):
    """`tools`: whether the request offered any; without, a tool call is text. `thinking`: whether the prompt already
    opened a `<think>` block."""

    def __init__(
        self, tokenizer: ChatTokenizer, markers: Markers, *, tools: bool, thinking: bool, stop: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._markers = markers
        self._tools = tools and markers.tools
        self._state = THINK if thinking else TEXT
        self._fresh = True
        self._thought = thinking
        self._stops = StopCutter(stop)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._said = 0
        self._held = ""
        self._begun = False
        self._reply = Reply()

    @property
    def reply(self) -> Reply:
        return self._reply

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        out: list[Delta] = []
        for id in ids:
            if self._state is DONE or id in self._tokenizer.stop_ids:
                self._close(out)
                self._state = DONE
                break
            self._token(id, out)
        return self._note(out)

    def finish(self) -> list[Delta]:
        out: list[Delta] = []
        self._close(out)
        self._state = DONE
        return self._note(out)

    def whole(self, ids: Sequence[int]) -> list[Delta]:
        markers = self._markers
        if self._thought or markers.think in ids or (self._tools and markers.call in ids):
            return super().whole(ids)
        # Nothing but text, as most replies are: one decoding instead of one a token.
        end = next((at for at, id in enumerate(ids) if id in self._tokenizer.stop_ids), len(ids))
        text = self._stops.feed(self._tokenizer.decode(ids[:end], skip_special_tokens=True)) + self._stops.finish()
        if self._tools:
            text = text.lstrip()
        self._state = DONE
        return self._note([Delta(content=text)] if text else [])

    def _token(self, id: int, out: list[Delta]) -> None:
        markers = self._markers
        if self._state is CALL:
            self._ids.append(id)
            if id == markers.call_end:
                self._block(out)
        elif self._tools and id == markers.call:
            self._text_ends(out, before_call=True)
            self._state, self._ids = CALL, [id]
        elif self._state is THINK and id == markers.think_end:
            self._text_ends(out)
            self._state = TEXT
        elif self._state is TEXT and id == markers.think and self._fresh:
            self._restart()
            self._state, self._thought = THINK, True
        else:
            self._ids.append(id)
            piece = self._stream.step(self._tokenizer.core, id)
            if piece:
                self._said += len(piece)
                self._say(piece, out)

    def _say(self, piece: str, out: list[Delta]) -> None:
        if self._state is THINK:
            out.append(Delta(reasoning=piece))
            return
        piece = self._stops.feed(piece)
        if piece.strip():
            self._fresh = False
        if self._tools or self._thought:
            # White space around tool calls and after the thoughts belongs to the form, not to the content.
            piece = self._held + piece
            if not self._begun:
                piece = piece.lstrip()
            cut = len(piece.rstrip()) if self._tools else len(piece)
            piece, self._held = piece[:cut], piece[cut:]
        if piece:
            self._begun = True
            out.append(Delta(content=piece))

    def _text_ends(self, out: list[Delta], *, before_call: bool = False) -> None:
        """Say what the byte decoder and the holds still keep, then begin a new stretch of text."""
        rest = self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._said :] if self._ids else ""
        if rest:
            self._say(rest, out)
        if self._state is TEXT:
            tail = self._stops.finish()
            if tail:
                self._begun = True
            if not before_call and self._begun:
                tail = self._held + tail
            if tail:
                out.append(Delta(content=tail))
            self._held = ""
        self._restart()

    def _restart(self) -> None:
        self._stream, self._ids, self._said = DecodeStream(skip_special_tokens=True), [], 0

    def _block(self, out: list[Delta]) -> None:
        _, found = self._markers.parser.extract(self._ids)
        call = found[0] if found else None
        if call is not None and call.status == ToolCallParseStatus.OK and call.name:
            out.append(Delta(call=ToolCall(call.name, _arguments(call.raw, call.arguments))))
        else:
            self._as_text(out)
        self._state = TEXT
        self._restart()

    def _as_text(self, out: list[Delta]) -> None:
        self._begun = True
        out.append(Delta(content=self._tokenizer.decode(self._ids)))

    def _close(self, out: list[Delta]) -> None:
        if self._state is CALL:
            self._as_text(out)
        elif self._state is not DONE:
            self._text_ends(out)

    def _note(self, deltas: list[Delta]) -> list[Delta]:
        reply = self._reply
        for delta in deltas:
            if delta.call is not None:
                reply.calls.append(delta.call)
            elif delta.reasoning:
                reply.reasoning = (reply.reasoning or "") + delta.reasoning
            else:
                reply.content = (reply.content or "") + delta.content
        return deltas


def _arguments(raw: str, arguments: object) -> str:
    """The arguments as JSON text: exactly as sampled where they end the block, else written anew."""
    if isinstance(arguments, str):
        return arguments
    at = raw.find('"arguments"')
    text = raw[at + len('"arguments"') :].lstrip().removeprefix(":").strip()
    if at >= 0 and text.endswith("}"):
        text = text[:-1].rstrip()
        try:
            if json.loads(text) == arguments:
                return text
        except json.JSONDecodeError:
            pass
    return json.dumps(arguments, ensure_ascii=False)
