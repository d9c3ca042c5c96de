"""Conversations as spans, for whoever reads OTLP: each span is what a request of one of the two forms says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from millrace.formats.spans.otlp_json import Span, spans
from millrace.producers.intake.otlp.assembler import Assembler
from millrace.producers.intake.otlp.conversation_events import EmittedEvent
from millrace.producers.intake.otlp.records import ClosedConversation, Took, decode, encode
from tests.support.imported import AT, GEN_AI, attributes, logged, traced

TRACES = ("0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319d", "2cf7651916cd43dd8448eb211c80319e")


def a_span(
    number: int, known: Mapping[str, Any], *, trace: str = TRACES[0], parent: int | None = None, **fields: Any
) -> dict[str, Any]:
    """A span of 5 ms, `number` ms after AT, in OTLP/JSON."""
    begun = AT * 1000 + number * 1_000_000
    return {
        "traceId": trace,
        "spanId": f"{number:016x}",
        "parentSpanId": "" if parent is None else f"{parent:016x}",
        "name": "span",
        "startTimeUnixNano": str(begun),
        "endTimeUnixNano": str(begun + 5_000_000),
        "attributes": attributes(known),
        "status": {},
        **fields,
    }


def a_call(asked: str, replied: str, id: str = "", **more: Any) -> dict[str, Any]:
    """The attributes of a model call."""
    said = {"role": "assistant", "parts": [{"type": "text", "content": replied}]}
    return {
        **GEN_AI,
        **({"gen_ai.response.id": id} if id else {}),
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": asked}]}]),
        "gen_ai.output.messages": json.dumps([said]),
        **more,
    }


def an_evaluation(number: int, value: float, *, trace: str = TRACES[0], span: int = 0, **known: Any) -> dict[str, Any]:
    """A log record that judges, in OTLP/JSON."""
    return {
        "traceId": trace,
        "spanId": f"{span:016x}" if span else "",
        "eventName": "gen_ai.evaluation.result",
        "timeUnixNano": str(AT * 1000 + number * 1_000_000),
        "attributes": attributes({"gen_ai.evaluation.name": "judge", "gen_ai.evaluation.score.value": value, **known}),
    }


def read_spans(given: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Spans and log records as the receiver reads them."""
    own = [one for one in given if "startTimeUnixNano" in one]
    beside = [one for one in given if "startTimeUnixNano" not in one]
    return [*spans(traced(own)), *spans(logged(beside))]


class Folded:
    """An assembler with what it gave, fed through the bytes of its records."""

    def __init__(self, quiet: int = 10) -> None:
        self.assembler = Assembler("p", quiet)
        self.events: list[EmittedEvent] = []
        self.records: list[bytes] = []

    def took(self, given: Sequence[Span], at: int, tenant: str = "local") -> None:
        self._fold(Took(tenant, at, list(given)))

    def close(self, at: int, captured: Sequence[str] = ()) -> int:
        due = self.assembler.all_over(at)
        for one in due:
            self._fold(ClosedConversation(one.tenant, one.at, one.traces, one.since, list(captured)))
        return len(due)

    def _fold(self, record: Took | ClosedConversation) -> None:
        data = encode(record)
        self.records.append(data)
        again = decode(data)
        if isinstance(again, Took):
            self.events += self.assembler.took(again, len(self.records) - 1)
        else:
            self.events += self.assembler.close(again)

    @property
    def told(self) -> list[tuple[str, str, int, Any]]:
        """The events, as what tells them apart."""
        return [(one.id, one.kin.id, one.step, one.draft) for one in self.events]

    def bodies(self, kind: str) -> list[Any]:
        return [one.draft.body for one in self.events if one.draft.kind == kind]


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Spans of up to three traces: calls, tools, nested agents, spans of something else, evaluations; some traces name
    a conversation, and some calls have two spans."""
    out: list[dict[str, Any]] = []
    count = draw(st.integers(1, 12))
    for number in range(1, count + 1):
        trace = draw(st.sampled_from(TRACES))
        parent = draw(st.none() | st.integers(1, count))
        name = {"gen_ai.conversation.id": "c"} if draw(st.integers(0, 5)) == 0 else {}
        match draw(st.sampled_from(("call", "twice", "tool", "agent", "other", "judged"))):
            case "call":
                out.append(
                    a_span(number, a_call(f"q{number}", f"a{number}", f"r{number}") | name, trace=trace, parent=parent)
                )
            case "twice":
                out.append(a_span(number, a_call("q", "a", f"r{number}") | name, trace=trace, parent=parent))
                out.append(a_span(number + 100, GEN_AI | {"gen_ai.response.id": f"r{number}"}, trace=trace))
            case "tool":
                known = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look"}
                known |= {"gen_ai.tool.call.id": f"t{number}", "gen_ai.tool.call.result": "rain"}
                out.append(a_span(number, known | name, trace=trace, parent=parent))
            case "agent":
                known = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": f"agent{number}"}
                out.append(a_span(number, known | name, trace=trace, parent=parent))
            case "other":
                out.append(a_span(number, {"http.method": "GET"}, trace=trace, parent=parent))
            case "judged":
                of = draw(st.integers(1, count))
                known = {"gen_ai.response.id": f"r{of}"} if draw(st.booleans()) else {}
                out.append(an_evaluation(number, number / 16, trace=trace, span=of, **known))
    return out
