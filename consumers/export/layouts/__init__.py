"""The layouts that `millrace export` writes, by name. A new one is a sibling here, and passes the one suite of all."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.consumers.export.layouts.atropos import Atropos
from millrace.consumers.export.layouts.base import ExportLayout
from millrace.consumers.export.layouts.exact import HuggingFace, Jsonl, Parquet
from millrace.consumers.export.layouts.openai import OpenAI, OpenAIPreference
from millrace.consumers.export.layouts.prime_rl import PrimeRl
from millrace.consumers.export.layouts.trl import Trl, TrlMessages, TrlPreference
from millrace.consumers.export.layouts.verifiers import Verifiers
from millrace.consumers.export.layouts.verl import Verl

_ALL: tuple[type[ExportLayout], ...] = (
    Jsonl,
    Parquet,
    HuggingFace,
    Trl,
    TrlMessages,
    TrlPreference,
    OpenAI,
    OpenAIPreference,
    PrimeRl,
    Verl,
    Atropos,
    Verifiers,
)
LAYOUTS: Mapping[str, type[ExportLayout]] = {layout.name: layout for layout in _ALL}
