"""The layouts that `millrace export` writes, by name. A new one is a sibling here, and passes the one suite of all."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.formats.writers.atropos import Atropos
from millrace.formats.writers.base import ExportLayout
from millrace.formats.writers.exact import HuggingFace, Jsonl, Parquet
from millrace.formats.writers.openai import OpenAI, OpenAIPreference
from millrace.formats.writers.prime_rl import PrimeRl
from millrace.formats.writers.trl import Trl, TrlMessages, TrlPreference
from millrace.formats.writers.verifiers import Verifiers
from millrace.formats.writers.verl import Verl

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
