"""Forms of calls that no published template at hand writes, read from templates written after them; blocks that hold no
sound call; gpt-oss's channels; templates that say the time."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.rendering import template as module
from millrace.dialects.rendering.base import NoContinuation, ParsedReply, RenderError, ToolCall
from millrace.dialects.rendering.forms.all import FORMS
from millrace.dialects.rendering.forms.base import schemas_of, typed_value
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from tests.dialects.families import DEEPSEEK, FAMILIES, HERMES, Family, write

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
USER = {"role": "user", "content": "Add."}
GPT_OSS = next(family for family in FAMILIES if family.name == "gpt-oss")

HEAD = """{{ bos_token }}{%- if tools %}{{ '[T]' + (tools | tojson) + '[/T]' }}{% endif %}
{%- for m in messages %}{% if m.role in ('user', 'system') %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[R]' + m.content + '[/R]' }}{% else %}{{ m.content or '' }}
{%- if m.tool_calls %}"""
TAIL = "{% endif %}{{ eos_token }}{% endif %}{% endfor %}"
LISTED = "{%- for c in m.tool_calls %}{%- if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
NAMED = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
MISTRAL = Family("Mistral", "", ("</s>",), ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]"), "<s>")
WRITTEN = {
    "mistral": (MISTRAL, f"[TOOL_CALLS][{LISTED}{NAMED}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]"),
    "mistral, 2025": (
        MISTRAL,
        "{%- for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name + '[ARGS]' }}{{ c.function.arguments | tojson }}"
        "{% endfor %}",
    ),
    "granite": (
        Family("Granite", "", ("<|end_of_text|>",), ("<|tool_call|>",)),
        f"<|tool_call|>[{{% for c in m.tool_calls %}}{NAMED}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]",
    ),
    "phi": (
        Family("Phi", "", ("<|end|>",), ("<|tool_call|>", "<|/tool_call|>")),
        "<|tool_call|>{{ m.tool_calls | tojson }}<|/tool_call|>",
    ),
    "deepseek": (
        Family("DeepSeek V3.1", "", ("<end>",), DEEPSEEK),
        "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
        "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    ),
    "pythonic": (
        Family("Llama 4", "", ("<|eot|>",), ()),
        "[{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}="
        "{{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]",
    ),
    "hermes": (
        Family("Granite 4", "", ("<|end_of_text|>",), HERMES),
        f"{{% for c in m.tool_calls %}}<tool_call>{NAMED}</tool_call>{{% endfor %}}",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_template_s_own_calls_are_read_and_gone_on_with(tmp_path: Path, name: str):
    family, calls = WRITTEN[name]
    renderer = TemplateRenderer(ChatTokenizer(write(tmp_path, family, HEAD + calls + TAIL)))
    form = renderer.markers.form
    assert form is not None
    assert name.startswith(form.name)
    made = [
        {"id": f"call_{at}", "type": "function", "function": {"name": "add", "arguments": json.dumps(given)}}
        for at, given in enumerate(({"a": "x [] {} Zürich"}, {"a": "3"}))
    ]
    past = [USER, {"role": "assistant", "content": "", "tool_calls": made}]
    new = [{"role": "tool", "tool_call_id": "call_0", "content": "7"}]
    prompt, after = renderer.render(past[:1], TOOLS), renderer.render([*past, *new], TOOLS)
    reply = after[len(prompt) : 1 + next(at for at, id in enumerate(after) if id in renderer.stop_ids)]
    parser = renderer.parser(prompt, TOOLS)
    parser.whole(reply)
    assert [json.loads(call.arguments) for call in parser.reply.calls] == [{"a": "x [] {} Zürich"}, {"a": "3"}]
    assert parser.reply.content is None
    added = renderer.bridge([*prompt, *reply], past, new, TOOLS)
    assert isinstance(added, list), added
    assert [*prompt, *reply, *added] == after


@pytest.mark.parametrize("broken", ["{", '[{"name": "add"', "add(", "Sure.", '{"name": "other", "parameters": {}}', ""])
@pytest.mark.parametrize("name", [*WRITTEN, "llama"])
def test_what_is_no_sound_call_is_told_as_the_text_that_it_is(tmp_path: Path, name: str, broken: str):
    family, template = WRITTEN.get(name, (None, None))
    if family is None or template is None:
        folder = write(tmp_path, next(family for family in FAMILIES if family.name == "Llama 3.1"))
    else:
        folder = write(tmp_path, family, HEAD + template + TAIL)
    renderer = TemplateRenderer(ChatTokenizer(folder))
    form = renderer.markers.form
    assert form is not None
    if name == "hermes" and broken.startswith('{"name": "other"'):
        broken = "[]"  # a call of an unknown tool is the client's to answer
    text = f"{form.open or ''}{broken}{form.close or ''}"
    parser = renderer.parser([], TOOLS)
    parser.whole(renderer.tokenizer.encode(text))
    if not (name in ("mistral", "granite", "phi", "mistral, 2025") and broken.startswith('{"name": "other"')):
        assert parser.reply.calls == []
        assert (parser.reply.content or "") == text


@settings(max_examples=60, deadline=None)
@given(text=st.text('<>{}[]():,="\\ \nab1|｜▁function=parameter_call', max_size=60))
def test_no_text_breaks_a_form(text: str):
    for form in FORMS:
        if form.read is not None:
            try:
                calls = form.read(text, schemas_of(TOOLS))
            except (ValueError, RecursionError):
                continue
            assert calls
            assert all(call.name and isinstance(call.arguments, str) for call in calls)


@pytest.mark.parametrize(
    ("text", "schema", "want"),
    [
        ("3", {"type": "string"}, "3"), ("3", {"type": "integer"}, 3), ("3", None, 3), ("x", None, "x"),
        ("True", {"type": "boolean"}, True), ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"enum": ["5", "6"]}, "5"), ("NaN", None, "NaN"), ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
    ],
)  # fmt: skip
def test_a_value_without_quotes_has_the_type_that_its_schema_gives_it(text: str, schema: Any, want: Any):
    assert typed_value(text, schema) == want


# ------------------------------------------------------------------ gpt-oss

COMMENT = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": "x"}'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It is 7. Bye."


@pytest.mark.parametrize("schema", [{"type": 5}, {"anyOf": 7}, {"oneOf": {}}, {"enum": True}, {"type": ["string", 3]}])
def test_a_schema_of_any_shape_reads_a_value(schema: Any):
    assert typed_value("7", schema) in (7, "7")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (f"{THOUGHT}{FINAL}<|return|>", ParsedReply("It is 7. Bye.", "Hm.")),
        (f"{THOUGHT}{COMMENT}{CALL}<|call|>", ParsedReply("I look.", "Hm.", [ToolCall("add", '{"a": "x"}')])),
        (f'{THOUGHT} to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}<|call|>',
         ParsedReply(None, "Hm.", [ToolCall("add", '{"a": 1}')])),
        (f"{CALL[:-1]}", ParsedReply(CALL[:-1])),
        ("<|channel|>analysis<|message|>Hm", ParsedReply(None, "Hm")),
        ("<|channel|>fin", ParsedReply()),
        ("No form at all.<|return|>", ParsedReply("No form at all.")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_channels_are_never_content(tmp_path_factory: pytest.TempPathFactory, text: str, want: ParsedReply, size: int):
    renderer = TemplateRenderer(ChatTokenizer(write(tmp_path_factory.mktemp("oss"), GPT_OSS)))
    parser = renderer.parser(renderer.render([USER], TOOLS), TOOLS)
    ids = renderer.tokenizer.encode(text)
    said = [delta for at in range(0, len(ids), size) for delta in parser.feed(ids[at : at + size])]
    said += parser.finish()
    assert parser.reply == want
    assert "".join(delta.content for delta in said) == (want.content or "")
    assert renderer.marks([]) is None, "a reply in channels is held to no shape that would break them"


def test_stop_strings_cut_the_final_channel_alone(tmp_path: Path):
    renderer = TemplateRenderer(ChatTokenizer(write(tmp_path, GPT_OSS)))
    parser = renderer.parser(renderer.render([USER], None), None, stop=("Hm", " Bye"))
    parser.whole(renderer.tokenizer.encode(f"{THOUGHT}{FINAL}"))
    assert parser.reply == ParsedReply("It is 7.", "Hm.")


# ------------------------------------------------------------------ refusals, and the time


def test_tools_are_refused_where_their_calls_could_not_be_read(tmp_path: Path):
    family = Family("own", "", ("<end>",), ())
    renderer = TemplateRenderer(ChatTokenizer(write(tmp_path, family, HEAD + "CALL {{ m.tool_calls[0].id }}" + TAIL)))
    assert renderer.render([USER], None)
    with pytest.raises(
        RenderError, match=r"tools are not supported with this model: its chat template writes no call in"
    ):
        renderer.render([USER], TOOLS)


def test_no_midnight_comes_between_what_a_bridge_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Clock(datetime):
        at = datetime(2026, 1, 1)

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            cls.at += timedelta(days=1)  # a new day at every look
            return cls.at

    monkeypatch.setattr(module, "datetime", Clock)
    family = next(family for family in FAMILIES if family.name == "Llama 3.2")
    renderer = TemplateRenderer(ChatTokenizer(write(tmp_path, family)))
    prompt = renderer.render([USER], None)
    assert "Today Date: " in renderer.tokenizer.decode(prompt)
    stored = [*prompt, *renderer.tokenizer.encode("Yes.<|eot_id|>")]
    added = renderer.bridge(stored, [USER, {"role": "assistant", "content": "Yes."}], [USER], None)
    assert not isinstance(added, NoContinuation)
    assert "Today Date" not in renderer.tokenizer.decode(added)
