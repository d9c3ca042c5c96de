"""What every renderer keeps to: bridges that extend exactly the stored ids, replies read back, reasoned refusals."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from millrace.dialects.rendering.base import NoContinuation, Renderer, RenderError, ReplyDelta, ToolCall
from tests.support import logged

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "What is 3 + 4? Zürich ☂"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":  3, "b": 4.0}'}}
ASSISTANT = {"role": "assistant", "content": "Let me check.", "tool_calls": [CALL]}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "7"}
SAMPLED = (
    "<think>\nhm\n</think>\n\nLet me check.\n<tool_call>"
    '\n{"name": "add",  "arguments": {"a":  3, "b": 4.0}}\n</tool_call>'
)

DRAFT = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def ids(renderer: Any, text: str) -> list[int]:
    encoded: list[int] = renderer.tokenizer.encode(text)
    return encoded


def last(renderer: Any) -> int:
    end: int = renderer.tokenizer.eos_token_id
    return end


def test_a_bridge_extends_exactly_the_stored_ids(either: Any):
    prompt = either.render([USER], TOOLS)
    # Never what the tokenizer would write for this text: the ids must be kept all the same.
    stored = [*prompt, *(token for letter in SAMPLED[:20] for token in ids(either, letter)), *ids(either, SAMPLED[20:])]
    stored.append(last(either))
    added = either.bridge(stored, [USER, ASSISTANT], [TOOL, TOOL], TOOLS)
    assert isinstance(added, list)
    text = either.tokenizer.decode(added)
    assert text.startswith("\n<|im_start|>user\n<tool_response>\n7\n</tool_response>")
    assert text.count("7") == 2
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    again = [*stored, *added, *ids(either, "It is 7."), last(either)]
    said = {"role": "assistant", "content": "It is 7.", "tool_calls": [CALL]}
    assert isinstance(either.bridge(again, [USER, ASSISTANT, TOOL, TOOL, said], [TOOL], TOOLS), list)


def test_a_canonical_tool_turn_bridges_to_what_a_full_rendering_gives(either: Renderer):
    reply = {**ASSISTANT, "content": "Let me.", "reasoning_content": "hm"}
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4.0}}\n</tool_call><|im_end|>'
    stored = [*either.render([USER], TOOLS), *ids(either, f"<think>\nhm\n</think>\n\nLet me.\n{call}")]
    added = either.bridge(stored, [USER, reply], [TOOL], TOOLS)
    assert isinstance(added, list)
    assert [*stored, *added] == either.render([USER, reply, TOOL], TOOLS)


@pytest.mark.parametrize("cut", ["unfinished", "<think>\nunfinished"])
def test_a_reply_that_was_cut_off_is_closed(either: Renderer, cut: str):
    stored = [*either.render([USER], TOOLS), *ids(either, cut)]
    added = either.bridge(stored, [USER, {"role": "assistant", "content": "unfinished"}], [TOOL], TOOLS)
    if isinstance(added, NoContinuation):
        assert added.reason
    else:
        assert last(either) in added[:2]


def test_what_cannot_be_bridged_is_refused_with_a_reason(either: Renderer):
    refused = either.bridge([], [USER, ASSISTANT], [TOOL], TOOLS)
    assert isinstance(refused, NoContinuation)
    assert refused.reason


def test_messages_that_cannot_be_written_are_refused(either: Renderer):
    with pytest.raises(RenderError):
        either.render([{"role": "user", "content": "x"}, {"content": "no role"}], None)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("It is 7.", None, "It is 7.", []),
        (SAMPLED, "hm", "Let me check.", [("add", '{"a":  3, "b": 4.0}')]),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', None, None, [("add", "{}")]),
        ("<tool_call>{broken</tool_call>", None, "<tool_call>{broken</tool_call>", []),
        (f"<think>a {DRAFT} b</think>c", f"a {DRAFT} b", "c", []),
        (f"<think>a {DRAFT}", "a", None, [("add", "{}")]),
    ],
)  # fmt: skip
def test_replies_are_read_back(either: Renderer, text: str, reasoning: Any, content: Any, calls: Any):
    parser = either.parser(either.render([USER], TOOLS), TOOLS)
    parser.whole([*ids(either, text), last(either)])
    reply = parser.reply
    assert ((reply.reasoning or "").strip() or None, (reply.content or "").strip() or None) == (reasoning, content)
    assert reply.calls == [ToolCall(*call) for call in calls]


PIECES = [
    "The answer is 42.", " ", "\n\n", "ü", "☂", "<think>", "</think>", "<think>\nhm\n</think>\n\n",
    "<tool_call>", "</tool_call>",
    '<tool_call>\n{"name": "add", "arguments": {"a": [1, {}]}}\n</tool_call>', '<tool_call>{"name": ""}</tool_call>',
    "<tool_call>[1]</tool_call>", "<tool_call>{broken</tool_call>",
]  # fmt: skip


@pytest.mark.parametrize("stop", [(), ("☂", "an")])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_streams_say_what_whole_replies_are(
    either: Any, stop: tuple[str, ...], tools: Any, caplog: pytest.LogCaptureFixture
):
    draw = random.Random(str((stop, tools)))
    prompt = either.render([USER], tools)
    for _ in range(150):
        sampled = [token for _ in range(draw.randrange(1, 9)) for token in ids(either, draw.choice(PIECES))]
        for _ in range(draw.randrange(3)):
            sampled.insert(draw.randrange(len(sampled) + 1), draw.randrange(3, 256))
        whole = either.parser(prompt, tools, stop)
        whole.whole(sampled)
        split, said = either.parser(prompt, tools, stop), list[ReplyDelta]()
        rest = list(sampled)
        while rest:
            size = draw.randrange(1, 4)
            said += split.feed(rest[:size])
            rest = rest[size:]
        said += split.finish()
        assert split.reply == whole.reply
        assert "".join(delta.content for delta in said) == (whole.reply.content or "")
        assert "".join(delta.reasoning for delta in said) == (whole.reply.reasoning or "")
        assert [delta.call for delta in said if delta.call] == whole.reply.calls
        assert all(isinstance(json.loads(call.arguments), object) for call in whole.reply.calls)
    assert not logged.records(caplog, "millrace.dialects.rendering"), (
        "the splitter and the package read some reply differently"
    )
