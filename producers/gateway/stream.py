"""The chunks of a streamed response, as OpenAI's clients parse them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from millrace.producers.gateway.call import Call, Choice
from millrace.producers.gateway.rendering.base import ReplyDelta

DONE = b"data: [DONE]\n\n"


def first_chunk(call: Call, choice: Choice) -> bytes:
    """The role, before anything else of a choice."""
    return _event(call, choice, {"role": "assistant", "content": ""})


def chunks_of(call: Call, choice: Choice, deltas: Sequence[ReplyDelta], tokens: int) -> list[bytes]:
    """What the last `tokens` tokens added; their log-probabilities go with the first chunk."""
    out: list[bytes] = []
    made = len(choice.calls) - sum(delta.call is not None for delta in deltas)
    logprobs = call.logprobs(choice, len(choice.ids) - tokens, len(choice.ids)) if tokens else None
    for delta in deltas:
        if delta.call is not None:
            content: dict[str, Any] = {"tool_calls": [{"index": made, **choice.calls[made]}]}
            made += 1
        elif delta.reasoning:
            content = {"reasoning_content": delta.reasoning}
        else:
            content = {"content": delta.content}
        out.append(_event(call, choice, content, logprobs=logprobs))
        logprobs = None
    if logprobs is not None:
        out.append(_event(call, choice, {}, logprobs=logprobs))
    return out


def last_chunks(call: Call) -> list[bytes]:
    """The finish reasons, the usage where asked for, and the end."""
    out = [_event(call, choice, {}, finish=choice.reason) for choice in call.choices]
    options = call.request.stream_options
    if options is not None and options.include_usage:
        body = {**call.head("chat.completion.chunk"), "choices": [], "usage": call.usage_body()}
        out.append(b"data: " + orjson.dumps(body) + b"\n\n")
    return [*out, DONE]


def _event(
    call: Call, choice: Choice, delta: dict[str, Any], *, finish: str | None = None, logprobs: Any = None
) -> bytes:
    part = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    return b"data: " + orjson.dumps({**call.head("chat.completion.chunk"), "choices": [part]}) + b"\n\n"
