"""Rows of every layout that can be imported, what each says, and the events that they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from millrace.formats.episodes.episode import Group
from millrace.formats.episodes.rows import BadRow
from millrace.formats.files import reader
from millrace.formats.imports.check import events, layout_of
from millrace.formats.imports.group_records import ImportTerms, Maker
from millrace.infra.log.base import Outgoing
from millrace.schemas import codec

TERMS = ImportTerms("ns.raw", "p", "local")
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the weather?"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where":"out"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
LOOKS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SAW = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
SAYS = {"role": "assistant", "content": "It rains."}
TALK = [*ASKED, LOOKS, SAW, SAYS]
AT = 1_714_557_600_000_000
TRACE, OTHER = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319d"


def attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A map as OTLP writes it."""
    return [{"key": name, "value": any_value(value)} for name, value in values.items()]


def any_value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case list():
            return {"arrayValue": {"values": [any_value(one) for one in value]}}
        case dict():
            return {"kvlistValue": {"values": attributes(value)}}
    raise TypeError(value)


def span(name: str, start: int, known: Mapping[str, Any], *, trace: str = TRACE, **fields: Any) -> dict[str, Any]:
    """A span that took 5 ms, `start` ms after AT."""
    begun = AT * 1000 + start * 1_000_000
    return {
        "traceId": trace,
        "spanId": f"{start:016x}",
        "name": name,
        "startTimeUnixNano": str(begun),
        "endTimeUnixNano": str(begun + 5_000_000),
        "attributes": attributes(known),
        "status": {},
        **fields,
    }


def traced(spans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    resource = {"attributes": attributes({"service.name": "shop"})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]}


def logged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"resourceLogs": [{"resource": {}, "scopeLogs": [{"logRecords": list(records)}]}]}


def said(role: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


USED = {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"where": "out"}}
ANSWERED = {"type": "tool_call_response", "id": "c1", "response": "rain"}
GEN_AI = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.provider.name": "openai"}
FIRST = GEN_AI | {
    "gen_ai.response.id": "r1",
    "gen_ai.usage.input_tokens": 11,
    "gen_ai.system_instructions": orjson.dumps([text("Be brief.")]).decode(),
    "gen_ai.input.messages": orjson.dumps([said("user", text("What is the weather?"))]).decode(),
    "gen_ai.output.messages": orjson.dumps([said("assistant", USED) | {"finish_reason": "tool_call"}]).decode(),
}
LOOKED = {
    "gen_ai.operation.name": "execute_tool",
    "gen_ai.tool.name": "look",
    "gen_ai.tool.call.id": "c1",
    "gen_ai.tool.call.result": "rain",
}
SECOND = GEN_AI | {
    "gen_ai.response.id": "r2",
    "gen_ai.system_instructions": [text("Be brief.")],
    "gen_ai.input.messages": [
        said("user", text("What is the weather?")),
        said("assistant", USED),
        said("tool", ANSWERED),
    ],
    "gen_ai.output.messages": [said("assistant", text("It rains."))],
}
EVALUATED = {
    "name": "gen_ai.evaluation.result",
    "timeUnixNano": str(AT * 1000 + 40_000_000),
    "attributes": attributes({"gen_ai.evaluation.name": "judge", "gen_ai.evaluation.score.value": 0.75}),
}
SPANS = [
    span("chat m", 30, SECOND, events=[EVALUATED]),
    span("chat m", 10, FIRST),
    span("execute_tool look", 20, LOOKED),
    span("GET /", 1, {"http.method": "GET"}),
]

ROWS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "chat": [{"messages": TALK, "tools": [TOOL], "reward": 0.75, "timestamp": "2024-05-01T10:00:00Z", "answer": 4}],
    "jsonl": [
        {"tokens": [1, 2], "mask": [0, 1], "logprobs": [0, -1], "versions": [-1, 3], "lineage": "l", "tenant": "x"}
        | {"sampled_versions": [3], "messages": TALK, "task_id": "t", "status": "truncated", "reward": 0.75}
        | {"rewards": [{"source": "verifier", "value": 0.75}, {"source": "other", "value": None}]}
    ],
    "verl": [
        {"data_source": "p", "prompt": ASKED, "messages": TALK, "tools": orjson.dumps([TOOL]).decode()}
        | {"reward_model": {"style": "rule"}, "extra_info": {"reward": 0.75, "split": "evaluation", "index": 3}}
    ],
    "trl": [{"prompt": TALK[:-1], "completion": [SAYS], "tools": None, "reward": 0.75}],
    "verifiers": [
        {"example_id": 7, "prompt": ASKED, "completion": TALK[2:], "reward": 0.75, "metrics": {"exact": 1.0}}
        | {"is_truncated": True, "error": None, "tool_defs": [TOOL]}
    ],
    "trl-preference": [
        {"prompt": ASKED, "chosen": [SAYS], "rejected": [{"role": "assistant", "content": "Sun."}]}
        | {"score_chosen": 0.75, "score_rejected": 0.25}
    ],
    "openai-preference": [
        {"input": {"messages": ASKED, "tools": [TOOL], "parallel_tool_calls": True}}
        | {"preferred_output": [SAYS], "non_preferred_output": [{"role": "assistant", "content": "Sun."}]}
    ],
    "atropos": [
        {"tokens": [[1], [2]], "masks": [[1], [-100]], "scores": [0.75, 0.25], "messages": [[*ASKED, SAYS], TALK]}
        | {"overrides": [{"task_id": "t"}, {"task_id": "t"}]}
    ],
    "otlp": [traced(SPANS[:2]), traced(SPANS[2:])],
}
"""rows that say that it rains, with a reward of 0.75 but for OpenAI's pairs"""


def write(path: Path, rows: Iterable[Any]) -> Path:
    """Rows as JSON lines; bytes as they are."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else orjson.dumps(row)) + b"\n" for row in rows))
    return path


def read(
    path: Path, layout: str = "", terms: ImportTerms = TERMS
) -> tuple[list[tuple[Group, list[Outgoing]]], list[tuple[int, BadRow]]]:
    """(groups with their records, refused rows with their numbers) of a file."""
    refused: list[tuple[int, BadRow]] = []
    source = reader(path)
    found = list(
        events(
            layout_of(source, layout)(),
            source,
            Maker(terms).group,
            lambda number, error: refused.append((number, error)),
            lambda done, total: None,
        )
    )
    return found, refused


def decoded(records: Iterable[Outgoing]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(event, body) of each record."""
    found = [codec.decode_as("Event", record.value or b"") for record in records]
    return [(dict(event), dict(codec.decode_body(event["kind"], event["body"]))) for event in found]


def bodies(records: Iterable[Outgoing], kind: str) -> list[dict[str, Any]]:
    """The bodies of one kind."""
    return [body for event, body in decoded(records) if event["kind"] == kind]
