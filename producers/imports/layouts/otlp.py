"""OpenTelemetry GenAI: files of OTLP in JSON, one `{"resourceSpans": ...}` or `{"resourceLogs": ...}` a line, as the
collector's file exporter writes them. Spans of one conversation, else of one trace, are an episode.

Invariants: the file is read twice, first for how many spans each conversation has, so that only conversations that are
open are in memory; steps are in the order in which they began; two spans of one reply are one call; a conversation of
which no message was recorded is refused, since nothing of it could be read or judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.producers.imports.episode import Answer, Episode, Group, Judged, Reply, Step, ToolUse
from millrace.producers.imports.genai import (
    AGENTS,
    CALLS,
    EVALUATION,
    TOOLS,
    Talk,
    matters,
    operation,
    talk,
)
from millrace.producers.imports.layouts.base import Layout
from millrace.producers.imports.messages import plain
from millrace.producers.imports.readers import Reader, Refuse, Watch
from millrace.producers.imports.rows import BadRow, Content, Row, json_text, number_of, text_of
from millrace.producers.imports.spans import KEYS, Said, Span, spans, tokens
from millrace.schemas import bounds

CONVERSATION = "gen_ai.conversation.id"


@dataclass(slots=True)
class _Open:
    """A conversation whose spans are not all read."""

    row: int
    left: int
    size: int = 0
    spans: list[Span] = field(default_factory=list)


class Otlp(Layout):
    """A conversation an episode: model calls, tool calls, evaluations."""

    name = "otlp"
    help = "OpenTelemetry GenAI spans and events in OTLP/JSON lines; a conversation, else a trace, is an episode"

    @classmethod
    def fits(cls, content: Mapping[str, Any]) -> bool:
        return any(key in content for key in KEYS)

    def episodes(self, row: Row) -> Sequence[Episode]:
        """None: an episode lies in many rows."""
        return []

    def groups(self, reader: Reader, refuse: Refuse, watch: Watch) -> Iterator[Group]:
        whose, count = self._counted(reader, watch)
        waiting: dict[str, _Open] = {}
        for row in reader.rows(refuse, lambda done, total: watch(total + done, 2 * total)):
            if not self.fits(row.content):
                refuse(row.number, BadRow("not_otlp", f"the line has neither {' nor '.join(KEYS)}"))
                continue
            for span in spans(row.content):
                if not span.trace or not matters(span):
                    self.passed["other span" if span.trace else "span without a trace"] += 1
                    continue
                name = whose.get(span.trace, span.trace)
                held = waiting.setdefault(name, _Open(row.number, count[name]))
                held.left -= 1
                held.size += _size(span)
                if held.size <= bounds.ROW_BYTES:
                    held.spans.append(span)
                if held.left <= 0:
                    yield from self._group(waiting.pop(name), refuse)

    def _counted(self, reader: Reader, watch: Watch) -> tuple[dict[str, str], Counter[str]]:
        """(the conversation of a trace that names one, how many spans each conversation or other trace has)."""
        whose: dict[str, str] = {}
        count: Counter[str] = Counter()
        for row in reader.rows(lambda number, error: None, lambda done, total: watch(done, 2 * total)):
            for span in spans(row.content):
                if span.trace and matters(span):
                    count[span.trace] += 1
                    said = text_of(span.attributes, CONVERSATION)
                    if said and len(said) <= bounds.NAME_BYTES:
                        whose.setdefault(span.trace, f"conversation {said}")
        for trace, name in whose.items():
            count[name] += count.pop(trace)
        return whose, count

    def _group(self, held: _Open, refuse: Refuse) -> Iterator[Group]:
        try:
            if held.size > bounds.ROW_BYTES:
                raise BadRow("row_too_large", f"a conversation has more than {bounds.ROW_BYTES:,} bytes (ROW_BYTES)")
            yield Group(held.row, [_Told(held.spans, self.passed).episode()])
        except BadRow as error:
            refuse(held.row, error)


class _Told:
    """One conversation, out of its spans."""

    def __init__(self, found: Sequence[Span], passed: Counter[str]) -> None:
        self._passed = passed
        self._logs: dict[str, list[Said]] = {}
        for one in found:
            if one.log:
                self._logs.setdefault(one.id, []).extend(one.events)
        self._spans = sorted((one for one in found if not one.log), key=lambda span: (span.start or 0, span.id))
        self._steps: list[Step] = []
        self._asked: dict[str, str] = {}
        """tool calls of replies, by id: their tool"""
        self._answered: set[str] = set()
        self._replies: dict[str, int] = {}
        """number of a reply, by its provider's id and by its span"""

    def episode(self) -> Episode:
        """Raises BadRow where nothing was recorded that a policy said."""
        if not self._spans:
            raise BadRow("no_spans", "its log records belong to no span of this file: join both files into one")
        calls = self._calls()
        if not calls:
            raise BadRow(
                "no_content",
                "no message of it was recorded: let the instrumentation capture content "
                "(OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT)",
            )
        for span in self._spans:
            if span.id in calls:
                self._call(span, calls[span.id])
            elif operation(span) in TOOLS:
                self._tool(span)
            elif operation(span) not in AGENTS | CALLS:
                self._passed[f"{operation(span)[:40]} span"] += 1
        first = self._spans[0]
        agents = [span for span in self._spans if operation(span) in AGENTS]
        return Episode(
            self._steps,
            task=json_text({"resource": first.resource}) if first.resource else "",
            rewards=self._rewards(),
            status="failed" if any(one.failed for one in agents or [first]) else "completed",
            agent=next((name for one in self._spans if (name := text_of(one.attributes, "gen_ai.agent.name"))), ""),
            at=next((one.start for one in self._spans if one.start), None),
            trace=first.trace if len(first.trace) == 32 else None,
        )

    def _calls(self) -> dict[str, Talk]:
        """What was said in each span that is a call; agents speak where no call of theirs was recorded."""
        for kinds in (CALLS, AGENTS):
            out: dict[str, Talk] = {}
            seen: set[str] = set()
            for span in self._spans:
                if operation(span) not in kinds:
                    continue
                said = talk(span, self._logs.get(span.id, ()))
                provider = text_of(span.attributes, "gen_ai.response.id")
                if not said.asked or not said.replies:
                    self._passed["call without messages"] += kinds is CALLS
                elif provider and provider in seen:
                    self._passed["second span of a call"] += 1
                else:
                    out[span.id] = said
                    seen.add(provider)
            if out:
                return out
        return {}

    def _call(self, span: Span, said: Talk) -> None:
        for one in said.asked:
            call = text_of(one, "tool_call_id")
            if one["role"] == "tool" and call in self._asked and call not in self._answered:
                self._answered.add(call)
                self._steps.append(Answer(call, self._asked[call], plain(one), at=span.start))
        known = span.attributes
        provider = text_of(known, "gen_ai.response.id")
        for name in (provider, span.id):
            self._replies.setdefault(name, len(self._replied()))
        if len(said.replies) > 1:
            self._passed["further choice of a call"] += len(said.replies) - 1
        reply = said.replies[0]
        for call in reply.get("tool_calls", ()):
            self._asked[call["id"]] = call["function"]["name"]
        self._steps.append(
            Reply(
                said.asked,
                len(said.asked),
                reply,
                said.tools,
                span.start,
                model=text_of(known, "gen_ai.response.model", "gen_ai.request.model"),
                provider=text_of(known, "gen_ai.provider.name", "gen_ai.system"),
                response_id=provider,
                finish=said.finish or _first(known.get("gen_ai.response.finish_reasons")),
                prompt_tokens=tokens(known, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
                completion_tokens=tokens(known, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
                cached_tokens=tokens(known, "gen_ai.usage.cache_read.input_tokens"),
                temperature=_share(known.get("gen_ai.request.temperature")),
                top_p=_share(known.get("gen_ai.request.top_p")),
                max_tokens=tokens(known, "gen_ai.request.max_tokens"),
                latency_us=_lasted(span),
                span=_span(span),
            )
        )

    def _tool(self, span: Span) -> None:
        known = span.attributes
        call, name = text_of(known, "gen_ai.tool.call.id"), text_of(known, "gen_ai.tool.name")
        if not call or call not in self._asked:
            call = call or span.id
            self._steps.append(
                ToolUse(call, name, _written(known.get("gen_ai.tool.call.arguments")), span.start, _span(span))
            )
        self._answered.add(call)
        result = _written(known.get("gen_ai.tool.call.result"))
        self._steps.append(
            Answer(call, name, result, "error" if span.failed else "ok", span.end, _lasted(span), _span(span))
        )

    def _replied(self) -> list[Step]:
        return [step for step in self._steps if isinstance(step, Reply)]

    def _rewards(self) -> list[Judged]:
        out: list[Judged] = []
        for span in self._spans:
            for said in (*span.events, *self._logs.get(span.id, ())):
                known = said.attributes
                if said.name != EVALUATION:
                    continue
                score = known.get("gen_ai.evaluation.score.value")
                if score is None:
                    self._passed["evaluation without a score"] += 1
                    continue
                out.append(
                    Judged(
                        number_of(score, "gen_ai.evaluation.score.value"),
                        text_of(known, "gen_ai.evaluation.name"),
                        label=text_of(known, "gen_ai.evaluation.score.label") or None,
                        critique=text_of(known, "gen_ai.evaluation.explanation") or None,
                        reply=self._replies.get(text_of(known, "gen_ai.response.id"), self._replies.get(span.id)),
                        at=said.at,
                    )
                )
        return out


def _size(span: Span) -> int:
    contents: list[Content] = [span.attributes, *(said.attributes for said in span.events)]
    return sum(len(json_text(one)) for one in contents)


def _lasted(span: Span) -> int:
    return min(max(0, (span.end or 0) - (span.start or 0)), bounds.INT) if span.start and span.end else 0


def _span(span: Span) -> str | None:
    return span.id if len(span.id) == 16 else None


def _first(reasons: Any) -> str:
    return str(reasons[0]) if isinstance(reasons, list) and reasons else ""


def _share(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 1.0


def _written(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json_text(value)
