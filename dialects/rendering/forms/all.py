"""The forms that are read."""

from __future__ import annotations

from millrace.dialects.rendering.forms.base import Form
from millrace.dialects.rendering.forms.deepseek import DEEPSEEK
from millrace.dialects.rendering.forms.function_xml import FUNCTION_XML
from millrace.dialects.rendering.forms.gemma import GEMMA
from millrace.dialects.rendering.forms.glm import GLM
from millrace.dialects.rendering.forms.granite import GRANITE
from millrace.dialects.rendering.forms.harmony import HARMONY
from millrace.dialects.rendering.forms.hermes import HERMES
from millrace.dialects.rendering.forms.llama import LLAMA
from millrace.dialects.rendering.forms.mistral import MISTRAL
from millrace.dialects.rendering.forms.phi import PHI
from millrace.dialects.rendering.forms.pythonic import LFM2, PYTHONIC
from millrace.dialects.rendering.tokenizer import ChatTokenizer

FORMS = (HERMES, FUNCTION_XML, GLM, DEEPSEEK, MISTRAL, PHI, GRANITE, GEMMA, LFM2, HARMONY, LLAMA, PYTHONIC)
"""those with tokens of their own first"""


def writable(form: Form, tokenizer: ChatTokenizer) -> bool:
    """Whether a tokenizer has all tokens of a form."""
    tokens = [*form.tokens, *(token for token in (form.open, form.close) if token is not None)]
    return all(tokenizer.convert_tokens_to_ids(token) is not None for token in tokens)
