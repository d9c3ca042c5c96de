"""Shapes of calls for `bench_delays`: what may take longest of every API and route, as large as it may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from millrace.schemas import bounds

LARGEST = (8 << 20) - 4096
REPORT = bounds.REPORT_BYTES - 4096
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


class Shape(NamedTuple):
    """One call: its body, the tokens of its reply and how they come. `path`: "" stands for a chat call. `far`: what an
    upstream beside the engines answers, None where engines do. `before`: so many turns of the same conversation were
    told before, each a response that the next one names. `frame`: the body goes over a WebSocket. `named`: the session
    that a chat call began before."""

    body: Callable[[], bytes]
    tokens: int = 20
    pieces: int = 1
    path: str = ""
    upstream: bool = False
    n: int = 1
    rivals: int = 0
    far: Callable[[], bytes] | None = None
    before: int = 0
    frame: bool = False
    named: str = ""


def chat(**fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000, **fields})


def said(text: str, **fields: Any) -> bytes:
    return chat(messages=[{"role": "user", "content": text}], **fields)


def raw(text: bytes) -> bytes:
    """A message whose text is given as it stands in JSON."""
    return chat(messages=[{"role": "user", "content": "@"}]).replace(b"@", text)


def many(count: int, size: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": f"{at} " + "x" * size} for at in range(count)] + [
        {"role": "user", "content": "hi"}
    ]


def echoed(arguments: Any) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return chat(messages=[*talk, {"role": "tool", "tool_call_id": "c", "content": "7"}], tools=[TOOL])


def events(count: int, size: int) -> bytes:
    return orjson.dumps({"events": [{"kind": "observation", "content": "x" * size}] * count})


VALUES = bounds.VALUES - 500
WORDS = "".join(chr(0x61 + at * 7 % 26) if at % 6 else " " for at in range(LARGEST // 2))
SHAPES = {
    "2 KB of text": Shape(lambda: said("word " * 400)),
    "15 KB of text": Shape(lambda: said(WORDS[: 15 << 10])),
    "1 MB of text": Shape(lambda: said(WORDS[: 1 << 20])),
    "4 MB of text": Shape(lambda: said(WORDS)),
    "8 MB, one letter": Shape(lambda: said("x" * LARGEST)),
    "8 MB of letters with accents": Shape(lambda: said("ü" * (LARGEST // 2))),
    "8 MB of escapes": Shape(lambda: raw(b"\\n" * (LARGEST // 2))),
    "8 MB of escaped letters": Shape(lambda: raw(b"\\u00fc" * (LARGEST // 6))),
    "8 MB of a special token": Shape(lambda: said("<|im_end|>" * (LARGEST // 10))),
    "8 MB in metadata": Shape(lambda: chat(metadata={"a": "x" * LARGEST})),
    "8 MB of blanks": Shape(lambda: chat().replace(b"{", b"{" + b" " * LARGEST, 1)),
    "9,000 messages": Shape(lambda: chat(messages=many(9000, 20))),
    "9,000 long messages": Shape(lambda: chat(messages=many(9000, 800))),
    "19,000 messages": Shape(lambda: chat(messages=many(19000, 1))),
    "7,000 tools": Shape(lambda: chat(tools=[TOOL] * 7000)),
    "a tool of 99,000 numbers": Shape(lambda: chat(tools=[{**TOOL, "x": list(range(VALUES))}])),
    "a tool of 49,000 names": Shape(lambda: chat(tools=[{**TOOL, "x": {f"n{i}": i for i in range(VALUES // 2)}}])),
    "metadata of 99,000 lists": Shape(lambda: chat(metadata={"a": [[]] * (VALUES // 2)})),
    "8 MB of small values": Shape(lambda: chat(metadata={"a": [[]] * (LARGEST // 3)})),
    "echoed arguments, 99,000 numbers": Shape(lambda: echoed({"a": list(range(VALUES))})),
    "echoed arguments in text, 2.7 million lists": Shape(lambda: echoed("[" + "[]," * (LARGEST // 3) + "1]")),
    "echoed arguments in text, 8 MB number": Shape(lambda: echoed('{"a": ' + "9" * LARGEST + "}")),
    "echoed arguments in text, 8 MB string": Shape(lambda: echoed('{"a": "' + "x" * LARGEST + '"}')),
    "256 KB with 30 choices": Shape(
        lambda: chat(n=30, messages=[{"role": "user", "content": WORDS[: 256 << 10]}]), n=30
    ),
    "60 KB with 128 choices": Shape(
        lambda: chat(n=128, messages=[{"role": "user", "content": WORDS[: 60 << 10]}]), n=128
    ),
    "128 choices of 1,000 tokens": Shape(lambda: chat(n=128, max_tokens=1000), 1000, n=128),
    "128 choices of up to 10,000 tokens": Shape(lambda: chat(n=128, max_tokens=10_000), 1000, 100, n=128),
    "reply of 60,000 tokens": Shape(lambda: chat(max_tokens=100_000), 60_000),
    "reply of 60,000 tokens, streamed at once": Shape(lambda: chat(max_tokens=100_000, stream=True), 60_000),
    "reply of 60,000 tokens, streamed in 600": Shape(lambda: chat(max_tokens=100_000, stream=True), 60_000, 600),
    "reply of 6,500 tokens with rivals": Shape(
        lambda: chat(max_tokens=6_500, logprobs=True, top_logprobs=19), 6_500, 3000, rivals=19
    ),
    "reply of 6,500 tokens with rivals, streamed at once": Shape(
        lambda: chat(max_tokens=6_500, logprobs=True, top_logprobs=19, stream=True), 6_500, rivals=19
    ),
    "an episode with a 2 MB task": Shape(lambda: orjson.dumps({"task": "x" * REPORT}), path="/v1/sessions"),
    "an episode with a task of 99,000 numbers": Shape(
        lambda: orjson.dumps({"task": list(range(VALUES))}), path="/v1/sessions"
    ),
    "an event of 2 MB": Shape(lambda: events(1, REPORT), path="events"),
    "1,024 events of 2 KB": Shape(lambda: events(1024, 2000), path="events"),
    "a reward with a 2 MB critique": Shape(lambda: orjson.dumps({"critique": "x" * REPORT}), path="reward"),
    "an end with a 2 MB output": Shape(lambda: orjson.dumps({"output": "x" * REPORT}), path="end"),
    "to an upstream: 8 MB of text": Shape(lambda: said("x" * LARGEST), upstream=True),
    "to an upstream: 9,000 messages": Shape(lambda: chat(messages=many(9000, 20)), upstream=True),
    "from an upstream: 8 MB": Shape(lambda: chat(), LARGEST // 8, upstream=True),
    "from an upstream: 100 choices of 60 KB": Shape(lambda: chat(), 10_000, upstream=True, n=100),
    "from an upstream: 8 MB streamed in 4": Shape(lambda: chat(stream=True), LARGEST // 8, 4, upstream=True),
}


# ---------------------------------------------------------------------- the other APIs

MESSAGES, RESPONSES, COMPLETIONS, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/completions", "/v1/embeddings"
COUNT = f"{MESSAGES}/count_tokens"
NAMED = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}


def message(content: Any = "hi", **fields: Any) -> bytes:
    return orjson.dumps(
        {"model": "m", "max_tokens": 1000, "messages": [{"role": "user", "content": content}], **fields}
    )


def counted(content: Any, **fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields})


def response(given: Any = "hi", **fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "input": given, **fields})


def items(count: int, size: int) -> list[dict[str, Any]]:
    return [{**one, "type": "message"} for one in many(count, size)]


def completion(prompt: Any = "hi", **fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "prompt": prompt, "max_tokens": 1000, **fields})


def framed(body: bytes) -> bytes:
    return orjson.dumps({"type": "response.create", **orjson.loads(body)})


def vectors() -> bytes:
    one = {"object": "embedding", "index": 0, "embedding": [0.123456789] * 3072}
    return orjson.dumps({"object": "list", "data": [one] * (LARGEST // 36_900), "usage": {"prompt_tokens": 7}})


BLOCKS = [{"type": "text", "text": "x"}] * 19_000
OTHERS = {
    "Messages: 1 MB of text": Shape(lambda: message(WORDS[: 1 << 20]), path=MESSAGES),
    "Messages: 4 MB of text": Shape(lambda: message(WORDS), path=MESSAGES),
    "Messages: 9,000 messages": Shape(lambda: message(messages=many(9000, 20)), path=MESSAGES),
    "Messages: 19,000 blocks": Shape(lambda: message(BLOCKS), path=MESSAGES),
    "Messages: 9,000 tools": Shape(lambda: message(tools=[NAMED] * 9000), path=MESSAGES),
    "Messages: reply of 60,000 tokens": Shape(lambda: message(max_tokens=100_000), 60_000, path=MESSAGES),
    "Messages: reply of 60,000 tokens, streamed at once": Shape(
        lambda: message(max_tokens=100_000, stream=True), 60_000, path=MESSAGES
    ),
    "count_tokens: 1 MB of text": Shape(lambda: counted(WORDS[: 1 << 20]), path=COUNT),
    "count_tokens: 4 MB of text": Shape(lambda: counted(WORDS), path=COUNT),
    "count_tokens: 8 MB, one letter": Shape(lambda: counted("x" * LARGEST), path=COUNT),
    "count_tokens: 19,000 blocks": Shape(lambda: counted(BLOCKS), path=COUNT),
    "count_tokens: 9,000 tools": Shape(lambda: counted("hi", tools=[NAMED] * 9000), path=COUNT),
    "Responses: 1 MB of text": Shape(lambda: response(WORDS[: 1 << 20]), path=RESPONSES),
    "Responses: 4 MB of text": Shape(lambda: response(WORDS), path=RESPONSES),
    "Responses: 9,000 items": Shape(lambda: response(items(9000, 20)), path=RESPONSES),
    "Responses: 9,000 tools": Shape(lambda: response(tools=[FUNCTION] * 9000), path=RESPONSES),
    "Responses: reply of 60,000 tokens": Shape(lambda: response(max_output_tokens=100_000), 60_000, path=RESPONSES),
    "Responses: reply of 60,000 tokens, streamed at once": Shape(
        lambda: response(max_output_tokens=100_000, stream=True), 60_000, path=RESPONSES
    ),
    "Responses: after 300 turns by previous_response_id": Shape(
        lambda: response("word " * 400), path=RESPONSES, before=300
    ),
    "Responses: after 12 turns of 60 KB": Shape(lambda: response(WORDS[: 60 << 10]), path=RESPONSES, before=12),
    "Responses: after 12 turns of 700 items": Shape(lambda: response(items(700, 20)), path=RESPONSES, before=12),
    "WebSocket: 1 MB of text": Shape(lambda: framed(response(WORDS[: 1 << 20])), path=RESPONSES, frame=True),
    "WebSocket: 4 MB of text": Shape(lambda: framed(response(WORDS)), path=RESPONSES, frame=True),
    "WebSocket: 9,000 items": Shape(lambda: framed(response(items(9000, 20))), path=RESPONSES, frame=True),
    "WebSocket: reply of 60,000 tokens at once": Shape(
        lambda: framed(response(max_output_tokens=100_000)), 60_000, path=RESPONSES, frame=True
    ),
    "completions: 1 MB of text": Shape(lambda: completion(WORDS[: 1 << 20]), path=COMPLETIONS),
    "completions: 4 MB of text": Shape(lambda: completion(WORDS), path=COMPLETIONS),
    "completions: 99,000 tokens": Shape(lambda: completion([5] * VALUES), path=COMPLETIONS),
    "completions: reply of 60,000 tokens": Shape(lambda: completion(max_tokens=100_000), 60_000, path=COMPLETIONS),
    "completions: 6,500 tokens with rivals, at once": Shape(
        lambda: completion(max_tokens=6_500, logprobs=19, stream=True), 6_500, rivals=19, path=COMPLETIONS
    ),
    "embeddings: 8 MB of text": Shape(
        lambda: orjson.dumps({"model": "far", "input": "x" * LARGEST}), path=EMBEDDINGS, far=vectors
    ),
    "embeddings: 99,000 texts": Shape(
        lambda: orjson.dumps({"model": "far", "input": ["x"] * VALUES}), path=EMBEDDINGS, far=vectors
    ),
    "feedback with a 2 MB correction": Shape(
        lambda: orjson.dumps({"session": "chat", "correction": "x" * REPORT}), path="/v1/feedback", named="chat"
    ),
}
SHAPES |= OTHERS
