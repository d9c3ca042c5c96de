"""What a reply that another model gave is to a form: the prompt that a gateway would give, and exactly the reply."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.apps.demo import tiny
from millrace.dialects.rendering import foreign_reply as module
from millrace.dialects.rendering.base import Renderer
from millrace.dialects.rendering.foreign_reply import Unspoken, speech_of
from millrace.dialects.rendering.package import PackagedRenderer
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from tests.dialects.families import FAMILIES, Family
from tests.dialects.families import write as write_family
from tests.dialects.rendering.conftest import QWEN3
from tests.support import chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "What is 3 + 4? Zürich ☂"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":3, "b": 4.0}'}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4.0}}\n</tool_call>'
TOOL = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "7"}
OPENS = chat_tokenizer.TEMPLATE.replace(
    "'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
UNENDED = chat_tokenizer.TEMPLATE.replace("{{- '<|im_end|>\\n' }}\n{%- else %}", "{{- '\\n' }}\n{%- else %}")
SHOUTS = chat_tokenizer.TEMPLATE.replace("m.content or ''", "(m.content or '') | upper")
TAIL = chat_tokenizer.TEMPLATE.replace(
    "{{- '<|im_end|>\\n' }}\n{%- else %}", "{{- '<|im_end|>\\nDone.' }}\n{%- else %}"
)


@cache
def of(folder: Path, kind: str) -> Renderer:
    """A form on the small tokenizer."""
    if kind == "packaged":
        return PackagedRenderer(ChatTokenizer(folder), "qwen3")
    if kind == "tiny":
        small = _beside(folder, kind)
        tiny.tokenizer().save_pretrained(small)
        return TemplateRenderer(ChatTokenizer(small))
    if kind == "qwen3":
        return TemplateRenderer(ChatTokenizer(folder))
    template = {"plain": chat_tokenizer.TEMPLATE, "forgetful": chat_tokenizer.FORGETFUL}.get(kind, kind)
    return TemplateRenderer(ChatTokenizer(chat_tokenizer.write(_beside(folder, str(abs(hash(kind)))), template)))


def _beside(folder: Path, name: str) -> Path:
    """The model in `folder` is shared with other files of tests, which copy all that lies there."""
    return folder.with_name(f"{folder.name}-{name}")


def text(renderer: Any, ids: list[int]) -> str:
    return str(renderer.tokenizer.decode(ids))


def said(content: str, thoughts: str = "", *calls: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": content}
    return out | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": [*calls]} if calls else {})


@pytest.mark.parametrize(
    ("kind", "reply", "written"),
    [
        ("plain", said("It is 7."), "It is 7.<|im_end|>"),
        ("plain", said("It is 7.", "hm"), "<think>\nhm\n</think>\n\nIt is 7.<|im_end|>"),
        ("plain", said("Let me.", "hm", CALL, CALL), f"<think>\nhm\n</think>\n\nLet me.\n{CALLED}\n{CALLED}<|im_end|>"),
        ("forgetful", said("", "", CALL), f"\n{CALLED}<|im_end|>"),
        ("qwen3", said("It is 7."), "<think>\n\n</think>\n\nIt is 7.<|im_end|>"),
        ("packaged", said("It is 7."), "<think>\n\n</think>\n\nIt is 7.<|im_end|>"),
        ("qwen3", said("Let me.", "hm", CALL), f"<think>\nhm\n</think>\n\nLet me.\n{CALLED}<|im_end|>"),
        ("packaged", said("Let me.", "hm", CALL), f"<think>\nhm\n</think>\n\nLet me.\n{CALLED}<|im_end|>"),
    ],
)  # fmt: skip
def test_each_form_says_a_reply_in_its_own_words(qwen3: Path, kind: str, reply: Any, written: str) -> None:
    renderer = of(qwen3, kind)
    found = speech_of(renderer, [USER], reply, TOOLS)
    assert found.prompt == renderer.render([USER], TOOLS)
    assert text(renderer, found.reply) == written


def test_the_demo_s_model_says_digits_and_its_end(qwen3: Path) -> None:
    found = speech_of(of(qwen3, "tiny"), [{"role": "user", "content": "352041"}], said("012345"), None)
    assert (found.prompt, found.reply) == (tiny.encode("352041"), [*tiny.encode("012345")[2:-1], tiny.EOS])


@pytest.mark.parametrize(
    ("kind", "reply", "tools", "why"),
    [
        (OPENS, said("It is 7."), None, module.REWRITTEN),
        (UNENDED, said("It is 7."), None, module.ENDLESS),
        (TAIL, said("It is 7."), None, module.ENDLESS),
        (SHOUTS, said("It is 7."), None, module.MISREAD),
        ("plain", said("It is<|im_end|>7."), None, module.ENDLESS),
        ("plain", said(CALLED), TOOLS, module.MISREAD),
        ("plain", said("", "", CALL), None, module.MISREAD),
        ("plain", said("a", "b</think>c"), None, module.MISREAD),
        ("packaged", said(f"so {CALLED}"), TOOLS, module.MISREAD),
        ("tiny", said("12", "", CALL), TOOLS, module.UNWRITTEN),
    ],
)  # fmt: skip
def test_what_a_form_cannot_say_is_refused_by_name(qwen3: Path, kind: str, reply: Any, tools: Any, why: str) -> None:
    asked = {"role": "user", "content": "1"} if kind == "tiny" else USER
    with pytest.raises(Unspoken, match=why.replace("(", r"\(")):
        speech_of(of(qwen3, kind), [asked], reply, tools)


def test_what_is_longer_than_the_context_is_refused_as_that(qwen3: Path, tmp_path: Path) -> None:
    renderer = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path)))
    renderer.limit_to(50)
    with pytest.raises(Unspoken, match=module.TOO_LONG):
        speech_of(renderer, [USER], said("It is 7. " * 400), None)


WORDS = st.text(st.sampled_from("ab 7.\nü☂<>{}\"'"), max_size=20)
SPECIAL = st.sampled_from(
    ["<think>", "</think>", "<|im_end|>", "<tool_call>", "</tool_call>", CALLED, "<|im_start|>user\n"]
)
CONTENT = st.lists(st.one_of(WORDS, SPECIAL), max_size=3).map("".join)
CALLS = st.lists(st.just(CALL), max_size=2)
REPLIES = st.builds(
    lambda content, thoughts, calls: said(content, thoughts, *calls), CONTENT, st.one_of(WORDS, CONTENT), CALLS
)
TURNS = st.lists(st.tuples(CONTENT, REPLIES), min_size=1, max_size=3)


@pytest.mark.parametrize("kind", ["plain", "forgetful", "qwen3", "packaged"])
@given(TURNS, st.sampled_from([None, TOOLS]))
def test_whatever_is_said_it_reads_back_or_is_refused(qwen3: Path, kind: str, turns: Any, tools: Any) -> None:
    """Whatever clients and providers put into a conversation: the mask is never anything but that very reply."""
    renderer = of(qwen3, kind)
    messages: list[Any] = []
    for asked, reply in turns:
        messages.append({"role": "user", "content": asked})
        try:
            found = speech_of(renderer, messages, reply, tools)
        except Unspoken:
            pass
        else:
            assert found.prompt == renderer.render(messages, tools), "what a gateway gives the engine"
            assert [id in renderer.stop_ids for id in found.reply] == [False] * (len(found.reply) - 1) + [True]
            parser = renderer.parser(found.prompt, tools)
            parser.feed(found.reply)
            parser.finish()
            assert (parser.reply.content or "").strip() == reply["content"].strip()
            assert len(parser.reply.calls) == len(reply.get("tool_calls", []))
        messages += [reply, *([TOOL] * len(reply.get("tool_calls", [])))]


def test_a_form_of_qwen3_is_the_same_in_both_siblings(qwen3: Path) -> None:
    assert "<think>" in QWEN3
    for reply in (said("It is 7."), said("x", "hm", CALL), said("", "", CALL)):
        assert speech_of(of(qwen3, "qwen3"), [USER], reply, TOOLS) == speech_of(
            of(qwen3, "packaged"), [USER], reply, TOOLS
        )


DUMB = {"Nemotron 3 Nano", "DeepSeek V3", "DeepSeek R1 Distill", "GLM 4.5", "Muse Glimmer"}
"""families whose own templates write or end a plain reply otherwise than the model says it"""
TALKS: list[tuple[list[Any], Any, Any]] = [
    ([USER], said("It is 7."), None),
    ([USER], said("It is 7.", "hm"), None),
    ([USER], said("", "", CALL), TOOLS),
    ([USER], said("", "hm", CALL, CALL), TOOLS),
    ([USER, said("", "", CALL), TOOL], said("It is 7."), TOOLS),
    ([USER, said("Yes."), USER], said("It is 7."), None),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_published_forms_say_the_reply_or_refuse_it(family: Family, tmp_path: Path) -> None:
    renderer = TemplateRenderer(ChatTokenizer(write_family(tmp_path, family)))
    for number, (messages, reply, tools) in enumerate(TALKS):
        try:
            found = speech_of(renderer, messages, reply, tools)
        except Unspoken:
            assert number or family.name in DUMB, "a plain reply is said"
            continue
        assert number or family.name not in DUMB, "it can be said by now: mend the page"
        assert found.prompt == renderer.render(messages, tools)
        assert [id in renderer.stop_ids for id in found.reply] == [False] * (len(found.reply) - 1) + [True]
        assert not reply["content"] or "".join(map(renderer.text, found.reply[:-1])).endswith(reply["content"])
