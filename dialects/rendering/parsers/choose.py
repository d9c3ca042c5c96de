"""The parser of replies in each form of calls."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.dialects.rendering.base import Parser, Tools
from millrace.dialects.rendering.forms.base import schemas_of
from millrace.dialects.rendering.parsers.block import BareParser
from millrace.dialects.rendering.parsers.harmony import HarmonyParser
from millrace.dialects.rendering.parsers.markers import MarkedParser, Markers, opens_thoughts
from millrace.dialects.rendering.tokenizer import ChatTokenizer


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
    marked = MarkedParser(tokenizer, markers, tools=schemas, thinking=thinking, stop=stop, stop_ids=stop_ids)
    if form is None or form.bare is None or schemas is None:
        return marked
    return BareParser(tokenizer, form, schemas, stop_ids, marked)
