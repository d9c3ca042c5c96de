"""OpenTelemetry GenAI: files of OTLP in JSON, one `{"resourceSpans": ...}` or `{"resourceLogs": ...}` a line, as the
collector's file exporter writes them. Spans of one conversation, else of one trace, are an episode.

Invariants: the file is read twice, first for how many spans each conversation has, so that only conversations that are
open are in memory; a conversation of which no message was recorded is refused, since nothing of it could be read or
judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from millrace.formats.episodes.episode import Episode, Group
from millrace.formats.episodes.rows import BadRow, Content, ImportRow
from millrace.formats.files import Refuse, RowReader, Watch
from millrace.formats.layouts.base import ImportLayout
from millrace.formats.spans.conventions import normal
from millrace.formats.spans.conversation import SpanConversation
from millrace.formats.spans.genai import conversation_name, matters
from millrace.formats.spans.otlp_json import KEYS, Span, size_of, spans
from millrace.schemas import bounds


@dataclass(slots=True)
class _Open:
    """A conversation whose spans are not all read."""

    row: int
    remainder: int
    size: int = 0
    spans: list[Span] = field(default_factory=list)


class OtlpReader(ImportLayout):
    """A conversation an episode: model calls, tool calls, evaluations."""

    name = "otlp"
    help = "OpenTelemetry GenAI spans and events in OTLP/JSON lines; a conversation, else a trace, is an episode"

    @classmethod
    def fits(cls, content: Content) -> bool:
        return any(key in content for key in KEYS)

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        """None: an episode lies in many rows."""
        return []

    def groups(self, reader: RowReader, refuse: Refuse, watch: Watch) -> Iterator[Group]:
        names, count = self._count_spans(reader, watch)
        waiting: dict[str, _Open] = {}
        for row in reader.rows(refuse, lambda done, total: watch(total + done, 2 * total)):
            if not self.fits(row.content):
                refuse(row.number, BadRow("not_otlp", f"the line has neither {' nor '.join(KEYS)}"))
                continue
            for span in map(normal, spans(row.content)):
                if not span.trace or not matters(span):
                    self.omissions["other span" if span.trace else "span without a trace"] += 1
                    continue
                name = names.get(span.trace, span.trace)
                conversation = waiting.setdefault(name, _Open(row.number, count[name]))
                conversation.remainder -= 1
                conversation.size += size_of(span)
                if conversation.size <= bounds.ROW_BYTES:
                    conversation.spans.append(span)
                if conversation.remainder <= 0:
                    yield from self._group(waiting.pop(name), refuse)

    def _count_spans(self, reader: RowReader, watch: Watch) -> tuple[dict[str, str], Counter[str]]:
        """(the conversation of a trace that names one, how many spans each conversation or other trace has)."""
        names: dict[str, str] = {}
        count: Counter[str] = Counter()
        for row in reader.rows(lambda number, error: None, lambda done, total: watch(done, 2 * total)):
            for span in map(normal, spans(row.content)):
                if span.trace and matters(span):
                    count[span.trace] += 1
                    if conversation := conversation_name(span):
                        names.setdefault(span.trace, f"conversation {conversation}")
        for trace, name in names.items():
            count[name] += count.pop(trace)
        return names, count

    def _group(self, conversation: _Open, refuse: Refuse) -> Iterator[Group]:
        try:
            if conversation.size > bounds.ROW_BYTES:
                raise BadRow("row_too_large", f"a conversation has more than {bounds.ROW_BYTES:,} bytes (ROW_BYTES)")
            yield Group(conversation.row, [SpanConversation(conversation.spans, self.omissions).episode()])
        except BadRow as error:
            refuse(conversation.row, error)
