"""The forms that are read."""

from __future__ import annotations

from millrace.producers.gateway.rendering.forms.base import Form
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
from millrace.producers.gateway.rendering.tokenizer import ChatTokenizer

FORMS = (HERMES, FUNCTION_XML, GLM, DEEPSEEK, MISTRAL, PHI, GRANITE, GEMMA, LFM2, HARMONY, LLAMA, PYTHONIC)
"""those with tokens of their own first"""


def writable(form: Form, tokenizer: ChatTokenizer) -> bool:
    """Whether a tokenizer has all tokens of a form."""
    needed = [*form.tokens, *(token for token in (form.open, form.close) if token is not None)]
    return all(tokenizer.convert_tokens_to_ids(token) is not None for token in needed)
