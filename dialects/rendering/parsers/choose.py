"""The parser of replies in each form of calls."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.dialects.rendering.base import ParsedReply, Parser, ReplyDelta, Tools
from millrace.dialects.rendering.forms.base import Form, Schemas, schemas_of
from millrace.dialects.rendering.parsers.harmony import HarmonyParser
from millrace.dialects.rendering.parsers.marker_parser import MarkedParser, Markers, opens_thoughts
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.schemas import bounds


class BareParser(Parser):
    """Of replies that are a block of calls as a whole, with no token that says so: Llama's JSON, Python's lists.

    A reply that begins as a block is held back until it ends, and is told as calls only if the form reads it whole; any
    other is told as it arrives, by `text`, the parser of replies without calls. `form` is one with `bare`."""

    def __init__(
        self, tokenizer: ChatTokenizer, form: Form, tools: Schemas, stop_ids: frozenset[int], text: Parser
    ) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._tools = tools
        self._stop_ids = stop_ids
        self._text = text
        self._ids: list[int] = []
        self._block: bool | None = None
        self._reply: ParsedReply | None = None

    @property
    def reply(self) -> ParsedReply:
        return self._text.reply if self._reply is None else self._reply

    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]:
        if self._block is False:
            return self._text.feed(ids)
        self._ids += ids
        if self._block is None:
            assert self._form.bare is not None
            self._block = self._form.bare(self._tokenizer.decode(self._reply_ids()))
        return self._text.feed(self._ids) if self._block is False else []

    def finish(self) -> list[ReplyDelta]:
        if self._block is False:
            return self._text.finish()
        assert self._form.read is not None
        try:
            calls = self._form.read(self._tokenizer.decode(self._reply_ids()), self._tools) if self._block else []
        except (ValueError, RecursionError):
            calls = []
        if not calls or len(calls) > bounds.CALLS:
            return self._text.whole(self._ids)
        self._reply = ParsedReply()
        return self._reply.take([ReplyDelta(call=call) for call in calls])

    def _reply_ids(self) -> list[int]:
        end = next((at for at, id in enumerate(self._ids) if id in self._stop_ids), len(self._ids))
        return self._ids[:end]


def parser_of(
    tokenizer: ChatTokenizer,
    markers: Markers,
    prompt: Sequence[int],
    tools: Tools,
    stop: Sequence[str],
    stop_ids: frozenset[int],
) -> Parser:
    """The parser of a reply in the form of `markers`, or of one without calls where these have none."""
    form = markers.form
    if form is not None and form.channels:
        return HarmonyParser(tokenizer, prompt, tools=bool(tools), stop=stop, stop_ids=stop_ids)
    schemas = schemas_of(tools) if tools else None
    thinking = opens_thoughts(tokenizer, markers, prompt, stop_ids)
    parser = MarkedParser(tokenizer, markers, tools=schemas, thinking=thinking, stop=stop, stop_ids=stop_ids)
    if form is None or form.bare is None or schemas is None:
        return parser
    return BareParser(tokenizer, form, schemas, stop_ids, parser)
