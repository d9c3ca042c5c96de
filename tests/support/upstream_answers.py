"""Answers of upstreams in every API, plain and as events of a stream, sound and odd.

Invariant: everything comes from the `random.Random` that is given, so that a seed names an answer."""

from __future__ import annotations

from random import Random
from typing import Any

from millrace.dialects.all import DIALECTS, reader
from tests.support import odd_json

READERS = {dialect.name: reader(dialect) for dialect in DIALECTS}
"""by the name of the dialect"""

WHOLE: dict[str, dict[str, Any]] = {
    "chat": {
        "object": "chat.completion",
        "id": "c",
        "choices": [
            {
                "index": at,
                "message": {
                    "role": "assistant",
                    "content": "x",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                "finish_reason": "stop",
            }
            for at in range(2)
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    },
    "completions": {
        "object": "text_completion",
        "id": "t",
        "choices": [{"index": at, "text": "x", "logprobs": None, "finish_reason": "stop"} for at in range(2)],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    },
    "messages": {
        "type": "message",
        "id": "m",
        "content": [
            {"type": "thinking", "thinking": "so"},
            {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 2},
    },
    "responses": {
        "object": "response",
        "id": "r",
        "status": "completed",
        "output": [
            {"type": "reasoning", "id": "s", "summary": [{"type": "summary_text", "text": "so"}]},
            {"type": "message", "id": "i", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ],
        "usage": {"input_tokens": 1, "output_tokens": 2},
    },
}
"""by the name of the API"""
EVENTS: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "x"}}]},
        {
            "choices": [
                {
                    "index": 1,
                    "delta": {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}}]},
                    "finish_reason": "stop",
                }
            ]
        },
        {"choices": [], "usage": {"prompt_tokens": 1}},
    ],
    "completions": [
        {"id": "t", "object": "text_completion", "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]},
        {"choices": [{"index": 1, "text": "y", "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
    ],
    "messages": [
        {
            "type": "message_start",
            "message": {"type": "message", "id": "m", "usage": {"input_tokens": 1, "output_tokens": 1}},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t", "name": "f"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a":[]}'}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
    ],
    "responses": [
        {"type": "response.created", "response": {"id": "r", "object": "response"}},
        {"type": "response.output_item.added", "output_index": 0, "item": {"type": "message", "id": "i"}},
        {"type": "response.output_text.delta", "output_index": 0, "delta": "x"},
        {"type": "response.completed", "response": WHOLE["responses"]},
    ],
}
REQUEST = {
    "chat": b'{"model":"far","messages":[{"role":"user","content":"hi"}]}',
    "completions": b'{"model":"far","prompt":"hi"}',
    "messages": b'{"model":"far","max_tokens":3,"messages":[{"role":"user","content":"hi"}]}',
    "responses": b'{"model":"far","input":"hi"}',
}


def whole(r: Random, api: str) -> bytes:
    """An answer with something odd in some places of it, or none."""
    given: Any = WHOLE[api]
    for _ in range(r.choice((0, 1, 1, 2, 3))):
        given = odd_json.changed(r, given)
    return _bytes(r, given)


def stream(r: Random, api: str) -> bytes:
    """Events, some left out, doubled or odd, also where one ends and whether."""
    out = []
    for given in EVENTS[api]:
        for _ in range(r.choice((0, 1, 1, 1, 1, 2))):
            event = odd_json.changed(r, given) if r.random() < 0.3 else given
            out.append(b"data: " + _bytes(r, event) + r.choice((b"\n\n", b"\n\n", b"\r\n\r\n", b"\n", b"")))
    return b"".join(out)


def _bytes(r: Random, given: Any) -> bytes:
    data = odd_json.text(given).encode(errors="surrogatepass")
    return odd_json.broken(r, data) if r.random() < 0.1 else data
