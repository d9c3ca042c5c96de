"""An episode out of the spans and log records of one conversation. Pure.

Invariants: steps are in the order in which they began, whatever the order in which spans came (log records of one
instant stand in the order in which they came); two spans of one reply are one call, and one that has the messages is
taken; nothing is made up for content that was not recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from millrace.formats.episodes.episode import ClaimedReward, Episode, ReplyStep, Step, ToolAnswerStep, ToolUseStep
from millrace.formats.episodes.messages import text_content
from millrace.formats.episodes.rows import BadRow, json_text, number_of, text_of
from millrace.formats.spans.genai import AGENTS, CALLS, EVALUATION, RESPONSE, TOOLS, Talk, operation, talk
from millrace.formats.spans.otlp_json import Span, SpanEvent, tokens
from millrace.schemas import bounds

IsOurs = Callable[[str], bool]
Where = tuple[str, str]
"""a trace and a span of it"""


class SpanConversation:
    """One conversation, out of its spans. omissions: counts what has no place in it, by kind; is_ours: whether a
    reply with this id of its provider is in the log already; beside: evaluations that name their reply."""

    def __init__(
        self,
        spans: Sequence[Span],
        omissions: Counter[str],
        is_ours: IsOurs = lambda id: False,
        beside: Sequence[SpanEvent] = (),
    ) -> None:
        self._omissions = omissions
        self._is_ours = is_ours
        self._beside = beside
        self._logs: dict[Where, list[SpanEvent]] = {}
        for one in spans:
            if one.log:
                self._logs.setdefault(_where(one), []).extend(one.events)
        self._spans = sorted((one for one in spans if not one.log), key=lambda span: (span.start or 0, *_where(span)))
        self._steps: list[Step] = []
        self._asked: dict[str, str] = {}
        """tool calls of replies, by id: their tool"""
        self._answered: set[str] = set()
        self.replies: dict[str, int] = {}
        """number of a reply, by its provider's id"""
        self.spoken: dict[Where, int] = {}
        """the same by its span"""
        self.captured = False
        """whether a call of it is in the log already"""

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
            if _where(span) in calls:
                self._call(span, calls[_where(span)])
            elif operation(span) in TOOLS:
                self._tool(span)
            elif operation(span) not in AGENTS | CALLS:
                self._omissions[f"{operation(span)[:40]} span"] += 1
        first = self._spans[0]
        agents = [span for span in self._spans if operation(span) in AGENTS]
        return Episode(
            self._steps,
            task=json_text({"resource": first.resource}) if first.resource else "",
            rewards=self._rewards(),
            status="failed" if any(one.has_failed for one in agents or [first]) else "completed",
            agent=next((name for one in self._spans if (name := text_of(one.attributes, "gen_ai.agent.name"))), ""),
            at=next((one.start for one in self._spans if one.start), None),
            trace=first.trace if len(first.trace) == 32 else None,
        )

    def _calls(self) -> dict[Where, Talk]:
        """What was said in each span that is a call; agents speak where no call of theirs was recorded."""
        for kinds in (CALLS, AGENTS):
            out: dict[Where, Talk] = {}
            providers: set[str] = set()
            for span in self._spans:
                if operation(span) not in kinds:
                    continue
                call_talk = talk(span, self._logs.get(_where(span), ()))
                provider = text_of(span.attributes, RESPONSE)
                if provider and self._is_ours(provider):
                    self._omissions["call in the log already"] += 1
                    self.captured = True
                elif not call_talk.prompts or not call_talk.replies:
                    self._pass("call without messages", int(kinds is CALLS))
                elif provider and provider in providers:
                    self._omissions["second span of a call"] += 1
                else:
                    out[_where(span)] = call_talk
                    providers.add(provider)
            if out or self.captured:
                return out
        return {}

    def _call(self, span: Span, call_talk: Talk) -> None:
        for one in call_talk.prompts:
            call = text_of(one, "tool_call_id")
            if one["role"] == "tool" and call in self._asked and call not in self._answered:
                self._answered.add(call)
                self._steps.append(ToolAnswerStep(call, self._asked[call], text_content(one), at=span.start))
        attributes = span.attributes
        provider = text_of(attributes, RESPONSE)
        number = len(self.spoken)
        self.spoken[_where(span)] = number
        if provider:
            self.replies.setdefault(provider, number)
        if len(call_talk.replies) > 1:
            self._omissions["further choice of a call"] += len(call_talk.replies) - 1
        reply = call_talk.replies[0]
        for call in reply.get("tool_calls", ()):
            self._asked[call["id"]] = call["function"]["name"]
        self._steps.append(
            ReplyStep(
                call_talk.prompts,
                len(call_talk.prompts),
                reply,
                call_talk.tools,
                span.start,
                model=text_of(attributes, "gen_ai.response.model", "gen_ai.request.model"),
                provider=text_of(attributes, "gen_ai.provider.name", "gen_ai.system"),
                response_id=provider,
                finish=call_talk.finish or _first(attributes.get("gen_ai.response.finish_reasons")),
                prompt_tokens=tokens(attributes, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
                completion_tokens=tokens(attributes, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
                cached_tokens=tokens(attributes, "gen_ai.usage.cache_read.input_tokens"),
                temperature=_share(attributes.get("gen_ai.request.temperature")),
                top_p=_share(attributes.get("gen_ai.request.top_p")),
                max_tokens=tokens(attributes, "gen_ai.request.max_tokens"),
                latency_us=_latency(span),
                span=_span(span),
            )
        )

    def _tool(self, span: Span) -> None:
        attributes = span.attributes
        call, name = text_of(attributes, "gen_ai.tool.call.id"), text_of(attributes, "gen_ai.tool.name")
        if not call or call not in self._asked:
            call = call or span.id
            self._steps.append(
                ToolUseStep(call, name, _text(attributes.get("gen_ai.tool.call.arguments")), span.start, _span(span))
            )
        self._answered.add(call)
        result = _text(attributes.get("gen_ai.tool.call.result"))
        self._steps.append(
            ToolAnswerStep(
                call, name, result, "error" if span.has_failed else "ok", span.end, _latency(span), _span(span)
            )
        )

    def _rewards(self) -> list[ClaimedReward]:
        out: list[ClaimedReward] = []
        for span in self._spans:
            for event in (*span.events, *_in_time(self._logs.pop(_where(span), ()))):
                out += self._claims(event, self.spoken.get(_where(span)))
        strays = [event for events in self._logs.values() for event in events]
        self._pass("log record of no span", sum(event.name != EVALUATION for event in strays))
        beside = [event for event in self._beside if text_of(event.attributes, RESPONSE) in self.replies]
        self._pass("evaluation of an unknown reply", len(self._beside) - len(beside))
        for event in _in_time([*strays, *beside]):
            out += self._claims(event, None)
        return out

    def _claims(self, event: SpanEvent, reply: int | None) -> list[ClaimedReward]:
        """An evaluation of the reply that it names, else of `reply`; nothing for any other event."""
        if event.name != EVALUATION:
            return []
        claim = claimed_reward(event, self.replies.get(text_of(event.attributes, RESPONSE), reply))
        self._pass("evaluation without a score", int(claim is None))
        return [] if claim is None else [claim]

    def _pass(self, kind: str, count: int) -> None:
        if count:
            self._omissions[kind] += count


def claimed_reward(event: SpanEvent, reply: int | None) -> ClaimedReward | None:
    """An evaluation as a judgement of reply number `reply`, None: of all; None for one without a score. Raises
    BadRow."""
    attributes = event.attributes
    score = attributes.get("gen_ai.evaluation.score.value")
    if score is None:
        return None
    return ClaimedReward(
        number_of(score, "gen_ai.evaluation.score.value"),
        text_of(attributes, "gen_ai.evaluation.name"),
        label=text_of(attributes, "gen_ai.evaluation.score.label") or None,
        critique=text_of(attributes, "gen_ai.evaluation.explanation") or None,
        reply=reply,
        at=event.at,
    )


def _latency(span: Span) -> int:
    return min(max(0, (span.end or 0) - (span.start or 0)), bounds.INT) if span.start and span.end else 0


def _span(span: Span) -> str | None:
    return span.id if len(span.id) == 16 else None


def _first(reasons: object) -> str:
    return str(reasons[0]) if isinstance(reasons, list) and reasons else ""


def _share(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 1.0


def _text(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json_text(value)


def _where(span: Span) -> Where:
    return span.trace, span.id


def _in_time(events: Sequence[SpanEvent]) -> list[SpanEvent]:
    return sorted(events, key=lambda event: (event.at or 0, json_text(event.attributes)))
