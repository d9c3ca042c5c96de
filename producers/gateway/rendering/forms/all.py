"""The forms that are read, and the parser of each."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.producers.gateway.rendering.bare import BareParser
from millrace.producers.gateway.rendering.base import Parser, Tools
from millrace.producers.gateway.rendering.forms.base import Form, schemas_of
from millrace.producers.gateway.rendering.forms.deepseek import DEEPSEEK
from millrace.producers.gateway.rendering.forms.function_xml import FUNCTION_XML
from millrace.producers.gateway.rendering.forms.gemma import GEMMA
from millrace.producers.gateway.rendering.forms.glm import GLM
from millrace.producers.gateway.rendering.forms.granite import GRANITE
from millrace.producers.gateway.rendering.forms.harmony import HARMONY
from millrace.producers.gateway.rendering.forms.hermes import HERMES
from millrace.producers.gateway.rendering.forms.llama import LLAMA
from millrace.producers.gateway.rendering.forms.mistral import MISTRAL
from millrace.producers.gateway.rendering.forms.phi import PHI
from millrace.producers.gateway.rendering.forms.pythonic import LFM2, PYTHONIC
from millrace.producers.gateway.rendering.harmony import HarmonyParser
from millrace.producers.gateway.rendering.marked import MarkedParser, Markers, opens_thoughts
from millrace.producers.gateway.rendering.tokenizer import ChatTokenizer

FORMS = (HERMES, FUNCTION_XML, GLM, DEEPSEEK, MISTRAL, PHI, GRANITE, GEMMA, LFM2, HARMONY, LLAMA, PYTHONIC)
"""those with tokens of their own first"""


def writable(form: Form, tokenizer: ChatTokenizer) -> bool:
    """Whether a tokenizer has all tokens of a form."""
    needed = [*form.tokens, *(token for token in (form.open, form.close) if token is not None)]
    return all(tokenizer.convert_tokens_to_ids(token) is not None for token in needed)


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
