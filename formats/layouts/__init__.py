"""The formats that `millrace import` reads and `millrace export` writes, by name. A new one is a sibling here, with its
reader, its writer, or both, and passes the one suite of all."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.formats.layouts.atropos import AtroposReader, AtroposWriter
from millrace.formats.layouts.base import ExportLayout, ImportLayout
from millrace.formats.layouts.chat import ChatRowReader, OpenAIWriter, TrlMessagesWriter
from millrace.formats.layouts.exact import ExactDatasetWriter, ExactParquetWriter, ExactReader, ExactWriter
from millrace.formats.layouts.otlp import OtlpReader
from millrace.formats.layouts.preferences import (
    OpenAIPreferenceReader,
    OpenAIPreferenceWriter,
    PreferenceReader,
    PreferenceWriter,
)
from millrace.formats.layouts.prime_rl import PrimeRlWriter
from millrace.formats.layouts.prompts import PromptReader, PromptWriter
from millrace.formats.layouts.verifiers import VerifiersReader, VerifiersWriter
from millrace.formats.layouts.verl import VerlReader, VerlWriter

_READERS: tuple[type[ImportLayout], ...] = (
    OtlpReader,
    ExactReader,
    AtroposReader,
    VerlReader,
    OpenAIPreferenceReader,
    PreferenceReader,
    VerifiersReader,
    PromptReader,
    ChatRowReader,
)
"""the more a layout asks for, the earlier it stands: the first that fits a row is taken"""
READERS: Mapping[str, type[ImportLayout]] = {layout.name: layout for layout in _READERS}
OTHER_NAMES: Mapping[str, str] = {"openai": "chat", "trl-messages": "chat", "parquet": "jsonl", "hf": "jsonl"}
"""layouts of `millrace export` that are read as another"""
_WRITERS: tuple[type[ExportLayout], ...] = (
    ExactWriter,
    ExactParquetWriter,
    ExactDatasetWriter,
    PromptWriter,
    TrlMessagesWriter,
    PreferenceWriter,
    OpenAIWriter,
    OpenAIPreferenceWriter,
    PrimeRlWriter,
    VerlWriter,
    AtroposWriter,
    VerifiersWriter,
)
WRITERS: Mapping[str, type[ExportLayout]] = {layout.name: layout for layout in _WRITERS}
