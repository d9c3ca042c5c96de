"""What a request says to the chat template: it has its effect in every API, opens a lineage when it changes, and fields
that would alter a reply are served or refused by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from millrace.dialects.all import CHAT
from millrace.dialects.conversation import ReplyShape
from millrace.dialects.errors import ApiError
from millrace.dialects.rendering.choose import choose
from millrace.dialects.rendering.package import PackagedRenderer
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.dialects.template_options import template_options
from millrace.producers.gateway.sessions.sessions import Sessions
from tests.dialects.families import FAMILIES, write
from tests.support import chat_tokenizer
from tests.support.gateway_world import ScriptedEngine, World, world

USER = {"role": "user", "content": "What is 3 + 4?"}
MORE = {"role": "user", "content": "And then?"}
EFFORT = "{%- if reasoning_effort is defined and reasoning_effort != 'medium' %}{{ '<|im_start|>system\\nEffort: ' + "
SWITCH = (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think></think>{% endif %}"
)
READS = EFFORT + "reasoning_effort + '<|im_end|>\\n' }}{% endif %}" + chat_tokenizer.TEMPLATE + SWITCH


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path_factory.mktemp("reads"), READS)))


@pytest.fixture
async def w(tmp_path: Path, reader: TemplateRenderer) -> AsyncIterator[World]:
    engine = ScriptedEngine(lambda *_: reader.tokenizer.encode("Yes.<|im_end|>"))
    async with world(tmp_path, reader, engine) as w:
        yield w


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": 0}},
         {"enable_thinking": True, "thinking": 0}),
        ({"messages": [{"content": "reasoning_effort"}]}, {}),
        ({"reasoning_effort": 3, "reasoning": "x", "thinking": []}, {}),
    ],
)  # fmt: skip
def test_options_go_by_their_names_in_templates(said: Any, want: Any):
    assert template_options(json.dumps(said).encode()) == want


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "eos_token", "raise_exception"])
def test_what_the_gateway_gives_itself_is_refused(name: str):
    with pytest.raises(ApiError, match=f"chat_template_kwargs: '{name}' is given by the gateway itself"):
        template_options(json.dumps({"chat_template_kwargs": {name: 1}}).encode())


def test_an_option_that_the_template_does_not_read_or_takes_by_itself_has_no_effect(reader: TemplateRenderer):
    assert reader.reads({"thinking": False, "reasoning_effort": "medium", "enable_thinking": True}) == {}
    options = {"reasoning_effort": "low", "enable_thinking": False}
    assert reader.reads({**options, "thinking": False}) == options
    assert reader.tokenizer.decode(reader.render([USER], None, options)) == (
        "<|im_start|>system\nEffort: low<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n"
        "<|im_start|>assistant\n<think></think>"
    )


def test_a_family_of_the_package_has_them_by_its_template(tmp_path: Path):
    folder = write(tmp_path, next(family for family in FAMILIES if family.name == "Qwen 3"))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    renderer = choose(folder, "auto")
    assert isinstance(renderer, PackagedRenderer)
    options = {"enable_thinking": False, "reasoning_effort": "low"}
    assert renderer.reads(options) == {"enable_thinking": False}
    prompt = renderer.render([USER], None, options)
    assert renderer.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    marks = renderer.marks(prompt)
    assert marks is not None
    assert marks.thoughts == "closed"


async def test_every_api_has_them(w: World):
    key = (await w.start())["api_key"]
    headers = {"authorization": f"Bearer {key}"}
    asked = [
        ("chat/completions", {"messages": [USER], "reasoning_effort": "low"}),
        ("chat/completions", {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}),
        ("responses", {"input": [USER], "reasoning": {"effort": "low"}}),
        ("messages", {"messages": [USER], "max_tokens": 9, "thinking": {"type": "disabled"}}),
        ("messages", {"messages": [USER], "max_tokens": 9, "output_config": {"effort": "low"}}),
    ]
    for path, body in asked:
        answer = await w.http.post(f"/v1/{path}", json={"model": "m", **body}, headers=headers)
        assert answer.status_code == 200, answer.text
    found = [w.gateway.engines.served["policy"].renderer.tokenizer.decode(one.prompt) for one in w.engine.asked]  # type: ignore[union-attr]
    assert ["Effort: low" in text for text in found] == [True, False, True, False, True]
    assert [text.endswith("<think></think>") for text in found] == [False, True, False, True, False]


async def test_a_change_of_options_opens_a_lineage_also_after_a_restart(w: World, tmp_path: Path):
    key = (await w.start())["api_key"]
    low = {"reasoning_effort": "low"}
    reply = (await w.chat([USER], key, **low)).json()["choices"][0]["message"]
    again = (await w.chat([USER, reply, MORE], key, **low, user="x")).json()["choices"][0]["message"]
    await w.chat([USER, reply, MORE, again, MORE], key, reasoning_effort="high")
    await w.chat([{**USER, "content": "b"}], key)
    one, two, three, _ = w.calls()
    assert (two["lineage"], two["prefix_len"] > 0) == (one["lineage"], True)
    assert three["opened"] == "the options of the chat template changed"
    (tmp_path / "other").mkdir()
    rebuilt = Sessions(tmp_path / "other", "policy")
    rebuilt.rebuild(w.log)
    (session,) = rebuilt.live.values()
    said = [known.options for known in session.lineages._lineages.values()]
    assert said == [low, {"reasoning_effort": "high"}, {}]


# ------------------------------------------------------------------ vLLM's own fields


def ask(**fields: Any) -> Any:
    return CHAT.parse(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"guided_json": {"type": "array"}}, ReplyShape("guided_json", {"type": "array"})),
        ({"guided_json": '{"type": "array"}'}, ReplyShape("guided_json", {"type": "array"})),
        ({"structured_outputs": {"json": {"type": "array"}, "regex": None}},
         ReplyShape("structured_outputs", {"type": "array"})),
        ({"structured_outputs": {"json_object": True}}, ReplyShape("structured_outputs")),
        ({"structured_outputs": {}}, None),
    ],
)  # fmt: skip
def test_json_asked_for_in_vllm_s_words_is_held_to(fields: Any, shape: ReplyShape | None):
    assert ask(**fields).output == shape


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a"}, {"guided_choice": ["a"]}, {"guided_grammar": "x"}, {"stop_token_ids": [3]},
        {"min_tokens": 3}, {"ignore_eos": True}, {"structured_outputs": {"regex": "a"}}, {"guided_json": "{"},
        {"structured_outputs": {"json": {}, "choice": ["a"]}}, {"guided_json": [1]}, {"echo": True},
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any]):
    with pytest.raises(ApiError) as refused:
        ask(**fields)
    assert refused.value.param == next(iter(fields))


def test_what_asks_for_nothing_is_taken():
    assert ask(top_k=-1, ignore_eos=False, min_tokens=0, stop_token_ids=[], guided_regex=None).top_k == 0
