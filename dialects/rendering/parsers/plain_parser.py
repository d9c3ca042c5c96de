"""Replies of a form that nobody knows: the text of their tokens up to the end token, or to a stop string.

Invariant: fed token by token or at once, the text is the same."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from millrace.dialects.rendering.base import ParsedReply, Parser, ReplyDelta
from millrace.dialects.rendering.parsers.stops import StopCutter
from millrace.dialects.rendering.tokenizer import ChatTokenizer


class PlainParser(Parser):
    """`stop_ids` end a reply; special tokens are no text."""

    def __init__(self, tokenizer: ChatTokenizer, stop_ids: frozenset[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._stops = StopCutter(stop)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._decoded = 0
        """characters that were decoded"""
        self._ended = False
        self._reply = ParsedReply(content="")

    @property
    def reply(self) -> ParsedReply:
        return self._reply

    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]:
        texts = []
        for id in ids:
            if self._ended or id in self._stop_ids:
                self._ended = True
                break
            self._ids.append(id)
            piece = self._stream.step(self._tokenizer.core, id) or ""
            self._decoded += len(piece)
            texts.append(self._stops.feed(piece))
        return self._deltas("".join(texts))

    def finish(self) -> list[ReplyDelta]:
        # Bytes of a character whose end did not come are text too, as they are when a reply comes at once.
        rest = self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._decoded :]
        return self._deltas(self._stops.feed(rest) + self._stops.finish())

    def _deltas(self, text: str) -> list[ReplyDelta]:
        self._reply.content = (self._reply.content or "") + text
        return [ReplyDelta(content=text)] if text else []
