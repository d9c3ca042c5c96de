"""What came of one program, read from what passed the witness, what the engine was asked, and the gateway's log.

Invariant: each verdict is a pure function of the three; none trusts the gateway alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from benchmarks.frameworks.script import CALLS, FIRST_ANSWER, LAST_ANSWER
from millrace.schemas.arrays import unpack
from tests.support.wire import Exchange, says

ROUTES = {"/v1/chat/completions": "chat", "/v1/responses": "Responses", "/v1/messages": "Messages"}
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """A line of the table. `trouble`: why a column is not as it should be, in words."""

    api: str
    calls: int
    finished: bool
    wire: bool
    roots: int
    lineages: int
    exact: bool
    kept: bool
    trouble: str

    @property
    def clean(self) -> bool:
        """Nothing is amiss."""
        return self.finished and self.wire and self.roots == 1 and self.exact and self.kept


def judge(
    seen: Sequence[Exchange],
    events: Sequence[dict[str, Any]],
    asked: Sequence[tuple[Tokens, Tokens]],
    said: dict[str, Any] | None,
    error: str = "",
) -> Row:
    """`asked`: prompt and reply of each call of the engine; `events`: of the log, decoded under `data`; `said`: the
    last line of the program, None where there is none; `error`: what it said instead."""
    passed = [one for one in seen if one.method == "POST" and one.path in ROUTES]
    answered = [one for one in passed if one.status < 300]
    found = [event for event in events if event["kind"] == "model_call"]
    calls = [event["data"] for event in found]
    finished = said is not None and ends_well(said)
    refused = sorted({f"{one.status} {_message(one.said)}" for one in passed if one.status >= 300})
    reasons = sorted({call["untrainable_reason"] for call in calls if not call["trainable"]} - {None})
    opened = sorted({call["opened"] for call in calls} - {None})
    trouble = [] if finished else ["; ".join(refused) or error or "other answers or other calls than were scripted"]
    trouble += [f"not trainable: {', '.join(reasons)}"] if reasons else []
    streams = {one.streamed for one in answered}
    return Row(
        api=", ".join(sorted({ROUTES[one.path] + (" stream" if one.streamed else "") for one in passed})) or "none",
        calls=len(calls),
        finished=finished,
        wire=unaltered(answered, calls),
        roots=len({event["root_trajectory"] for event in found}),
        lineages=len({(event["trajectory"], event["data"]["lineage"]) for event in found}),
        exact=exact(calls, asked),
        kept=len(answered) == len(calls),
        trouble="; ".join(trouble + ([f"lineages: {', '.join(opened)}"] if len(opened) > 1 and streams else [])),
    )


def ends_well(said: dict[str, Any]) -> bool:
    """Both answers are there, and each tool was called as scripted, whatever the order of what ran at once."""
    first, last = (str(said["answers"][at]) if len(said["answers"]) > at else "" for at in (0, 1))
    called = sorted([name, float(a), float(b)] for name, a, b in said["calls"])
    return FIRST_ANSWER in first and LAST_ANSWER in last and called == sorted(CALLS)


def unaltered(answered: Sequence[Exchange], calls: Sequence[dict[str, Any]]) -> bool:
    """The log holds each request byte for byte as it was sent, and beside it the reply that was received, streamed ones
    as far as their events say."""
    requests = Counter(one.asked for one in answered) == Counter(call["request"] for call in calls)
    return requests and all(
        any(call["request"] == one.asked and says(call["response"], one) for call in calls) for one in answered
    )


def exact(calls: Sequence[dict[str, Any]], asked: Sequence[tuple[Tokens, Tokens]]) -> bool:
    """The lineages of the log, put together again, are what the engine was asked and what it sampled, id by id."""
    lineages: dict[str, Tokens] = {}
    rebuilt = []
    for call in calls:
        prompt = (*lineages.get(call["lineage"], ())[: call["prefix_len"]], *_ids(call["prompt_ids"]))
        output = _ids(call["output_ids"])
        lineages[call["lineage"]] = prompt + output
        rebuilt.append((prompt, output))
    return Counter(rebuilt) == Counter(asked)


def _ids(array: Any) -> Tokens:
    return tuple(unpack(array).tolist())


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return body[:200].decode(errors="replace")
