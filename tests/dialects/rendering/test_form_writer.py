"""No message vanishes: developers are heard, and what a form leaves out is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.dialects.rendering.base import NoContinuation, RenderError
from millrace.dialects.rendering.package import PackagedRenderer
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from tests.dialects.rendering.conftest import QWEN3
from tests.support import chat_tokenizer
from tests.support.gateway_world import ScriptedEngine, world

USER = {"role": "user", "content": "What is 3 + 4?"}
DEVELOPER = {"role": "developer", "content": "Answer in French."}
SYSTEM = {"role": "system", "content": "Answer in French."}
REPLY = {"role": "assistant", "content": "It is 7."}

ONLY_USERS = """{%- for m in messages %}{% if m.role in ('user', 'assistant') %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""drops every system, developer and tool message"""
FIRST_ONLY = """{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{% if m.role != "system" %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""writes a system message in the first place only"""
AS_JSON = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content | upper | tojson) + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""writes what is said in other letters"""
NO_CALLS = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""knows nothing of tool calls"""


def make(folder: Path, template: str) -> TemplateRenderer:
    return TemplateRenderer(ChatTokenizer(chat_tokenizer.write(folder, template)))


def test_a_form_without_developers_hears_them_as_the_system(qwen3: Path, tmp_path: Path):
    packaged = PackagedRenderer(ChatTokenizer(qwen3), "qwen3")
    for renderer in (packaged, make(tmp_path, QWEN3)):
        assert renderer.render([DEVELOPER, USER], None) == renderer.render([SYSTEM, USER], None)


def test_a_form_that_writes_developers_keeps_them(tmp_path: Path):
    renderer = make(tmp_path, chat_tokenizer.TEMPLATE)
    assert "<|im_start|>developer\nAnswer in French." in renderer.tokenizer.decode(
        renderer.render([DEVELOPER, USER], None)
    )


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        (ONLY_USERS, [SYSTEM, USER], "message 0 (system)"),
        (ONLY_USERS, [DEVELOPER, USER], "message 0 (system)"),
        (ONLY_USERS, [USER, REPLY, {"role": "tool", "content": "7", "tool_call_id": "a"}], "message 2 (tool)"),
        (FIRST_ONLY, [USER, SYSTEM], "message 1 (system)"),
        (FIRST_ONLY, [SYSTEM, DEVELOPER, USER], None),
        (NO_CALLS, [USER, {"role": "assistant", "content": "", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ]}], "message 1 (assistant)"),
        (ONLY_USERS, [{"role": "system", "content": " "}, USER], None),
        (FIRST_ONLY, [SYSTEM, USER], None),
        (AS_JSON, [SYSTEM, USER, REPLY, USER], None),
    ],
)  # fmt: skip
def test_what_a_form_leaves_out_is_refused(tmp_path: Path, template: str, messages: Any, lost: str | None):
    renderer = make(tmp_path, template)
    for _ in range(2):
        if lost is None:
            assert renderer.render(messages, None)
        else:
            with pytest.raises(RenderError) as caught:
                renderer.render(messages, None)
            assert str(caught.value).startswith(lost)


def test_a_bridge_leaves_nothing_out(tmp_path: Path):
    renderer = make(tmp_path, ONLY_USERS)
    stored = [*renderer.render([USER], None), *renderer.tokenizer.encode("It is 7.<|im_end|>")]
    assert isinstance(renderer.bridge(stored, [USER, REPLY], [USER], None), list)
    refused = renderer.bridge(stored, [USER, REPLY], [SYSTEM, USER], None)
    assert isinstance(refused, NoContinuation)
    assert "message 2 (system) would be left out" in refused.reason


async def test_a_client_is_told_which_message_would_vanish(tmp_path: Path):
    renderer = make(tmp_path / "model", ONLY_USERS)
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("It is 7.<|im_end|>"))
    async with world(tmp_path, renderer, engine) as w:
        answer = await w.chat([DEVELOPER, USER])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_messages")
        assert "message 0" in answer.json()["error"]["message"]
        assert (await w.chat([USER])).status_code == 200
        assert len(engine.asked) == 1
