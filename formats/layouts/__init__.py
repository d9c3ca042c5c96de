"""The layouts that `millrace import` reads, by name. A new one is a sibling here, and passes the one suite of all."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.formats.layouts.atropos import Atropos
from millrace.formats.layouts.base import ImportLayout
from millrace.formats.layouts.chat import Chat, Exact, Verl
from millrace.formats.layouts.otlp import Otlp
from millrace.formats.layouts.pairs import OpenAIPreference, Preference
from millrace.formats.layouts.prompts import Prompt, Verifiers

_ALL: tuple[type[ImportLayout], ...] = (
    Otlp,
    Exact,
    Atropos,
    Verl,
    OpenAIPreference,
    Preference,
    Verifiers,
    Prompt,
    Chat,
)
"""the more a layout asks for, the earlier it stands: the first that fits a row is taken"""
LAYOUTS: Mapping[str, type[ImportLayout]] = {layout.name: layout for layout in _ALL}
OTHER_NAMES: Mapping[str, str] = {"openai": "chat", "trl-messages": "chat", "parquet": "jsonl", "hf": "jsonl"}
"""layouts of `millrace export` that are read as another"""
