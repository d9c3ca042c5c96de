"""Templates as transformers writes them, bridges that keep stored ids, parsers that stream what they say whole."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.dialects.rendering.base import NoContinuation, RenderError, ReplyDelta, ToolCall
from millrace.dialects.rendering.parsers.stops import StopCutter
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.errors import ConfigError
from tests.support import chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "What is 3 + 4? Zürich ☂"}
ASSISTANT = {
    "role": "assistant",
    "content": "Let me check.",
    "reasoning_content": "hm",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":  3, "b": 4.0}'}}],
}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "7"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer.write(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> TemplateRenderer:
    return TemplateRenderer(ChatTokenizer(folder))


def ids(renderer: TemplateRenderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text)


@given(text=st.text(st.characters(codec="utf-8"), max_size=20))
@example(text="ü☂🙂\N{REPLACEMENT CHARACTER}<|im_end|>")
def test_the_bytes_of_tokens_are_those_of_their_text(renderer: TemplateRenderer, text: str) -> None:
    assert b"".join(map(renderer.token_bytes, ids(renderer, text))) == text.encode()


@pytest.mark.parametrize("messages", [[USER], [USER, ASSISTANT, TOOL], [{"role": "system", "content": ""}, USER]])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendering_equals_transformers(folder: Path, renderer: TemplateRenderer, messages: Any, tools: Any):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    prepared = json.loads(json.dumps(messages))
    for message in prepared:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    want = theirs.apply_chat_template(prepared, tools=tools, add_generation_prompt=True, return_dict=False)
    assert renderer.render(messages, tools) == want


def in_list(folder: Path, templates: dict[str, str]) -> None:
    settings = folder / "tokenizer_config.json"
    named = [{"name": name, "template": template} for name, template in templates.items()]
    settings.write_text(json.dumps({**json.loads(settings.read_bytes()), "chat_template": named}))
    (folder / "chat_template.jinja").unlink()


def in_files(folder: Path, templates: dict[str, str]) -> None:
    (folder / "additional_chat_templates").mkdir()
    for name, template in templates.items():
        own = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
        (folder / f"{own}.jinja").write_text(template)


@pytest.mark.parametrize("keep", [in_list, in_files])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_of_several_templates_the_one_for_tools_writes_them_as_in_transformers(tmp_path: Path, keep: Any, tools: Any):
    from transformers import PreTrainedTokenizerFast

    chat_tokenizer.write(tmp_path)
    plain, with_tools = chat_tokenizer.TEMPLATE, chat_tokenizer.TEMPLATE.replace("# Tools", "# You may call")
    keep(tmp_path, {"rag": "{{ documents }}", "tool_use": with_tools, "default": plain})
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    want = theirs.apply_chat_template([USER], tools=tools, add_generation_prompt=True, return_dict=False)
    renderer = TemplateRenderer(ChatTokenizer(tmp_path))
    assert renderer.render([USER], tools) == want
    assert ("You may call" in renderer.tokenizer.decode(want)) is (tools is not None)


def test_a_bridge_keeps_stored_ids_and_adds_what_is_new(renderer: TemplateRenderer):
    prompt = renderer.render([USER], TOOLS)
    # Not what the tokenizer would write: one byte a token, and arguments that the template would write otherwise.
    sampled = [i for text in ("x<tool_call", '>{"name": "add",  "arguments": {}}') for i in ids(renderer, text)]
    end = renderer.tokenizer.eos_token_id
    added = renderer.bridge([*prompt, *sampled, end], [USER, ASSISTANT], [TOOL], TOOLS)
    assert isinstance(added, list)
    text = renderer.tokenizer.decode(added)
    assert text == "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_a_bridge_closes_a_reply_that_was_cut_off(renderer: TemplateRenderer):
    stored = [*renderer.render([USER], None), *ids(renderer, "unfinished")]
    added = renderer.bridge(stored, [USER, {"role": "assistant", "content": "unfinished"}], [USER], None)
    assert isinstance(added, list)
    assert added[0] == renderer.tokenizer.eos_token_id


def test_a_canonical_reply_bridges_to_what_a_full_rendering_gives(renderer: TemplateRenderer):
    reply = {"role": "assistant", "content": "The answer is 42."}
    stored = [*renderer.render([USER], None), *ids(renderer, "The answer is 42.<|im_end|>")]
    added = renderer.bridge(stored, [USER, reply], [USER], None)
    assert isinstance(added, list)
    assert [*stored, *added] == renderer.render([USER, reply, USER], None)


def test_a_template_that_rewrites_the_past_is_refused(tmp_path: Path):
    renderer = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path, chat_tokenizer.FORGETFUL)))
    stored = [*renderer.render([USER], None), renderer.tokenizer.eos_token_id or 0]
    refusal = renderer.bridge(stored, [USER, ASSISTANT], [TOOL], None)
    assert refusal == NoContinuation("the template rewrites earlier messages")


def test_another_end_token_is_refused(tmp_path: Path):
    folder = chat_tokenizer.write(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    renderer = TemplateRenderer(ChatTokenizer(folder))
    assert renderer.stop_ids == {0, 2}
    refusal = renderer.bridge([5, 0], [USER, ASSISTANT], [TOOL], None)
    assert isinstance(refusal, NoContinuation)
    assert "another token" in refusal.reason


def test_errors_of_the_template_say_so(renderer: TemplateRenderer, tmp_path: Path):
    with pytest.raises(RenderError, match="cannot render"):
        renderer.render([{"role": "user", "content": None}], None)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        ChatTokenizer(tmp_path)


def test_tools_need_the_markers(tmp_path: Path):
    folder = chat_tokenizer.write(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"] = [token for token in data["added_tokens"] if "tool_call" not in token["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(RenderError, match="tools are not supported with this model"):
        TemplateRenderer(ChatTokenizer(folder)).render([USER], TOOLS)


ADD = '{"name": "add", "arguments": '
SWAPPED = '{"arguments": {"x": "}"}, "name": "add"}'
REPLIES = [
    ("The answer is 42.", "The answer is 42.", None, []),
    (" spaces kept \n", " spaces kept \n", None, []),
    ("<think>\nhm\n</think>\n\nZürich ☂", "Zürich ☂", "\nhm\n", []),
    (f'Let me.\n<tool_call>\n{ADD}{{"a":  3}}}}\n</tool_call>', "Let me.", None, ['{"a":  3}']),
    (f"<tool_call>{ADD}{{}}}}</tool_call>\n<tool_call>{SWAPPED}</tool_call>", None, None, ["{}", '{"x": "}"}']),
    ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", None, []),
    ('<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', None, []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "reasoning", "arguments"), REPLIES)
def test_replies_are_parsed(renderer: TemplateRenderer, text: str, content: Any, reasoning: Any, arguments: Any):
    tools = TOOLS if "<tool_call>" in text else None
    parser = renderer.parser([], tools)
    parser.whole([*ids(renderer, text), *renderer.stop_ids, 77])
    reply = parser.reply
    assert (reply.content, reply.reasoning) == (content, reasoning)
    assert [call.arguments for call in reply.calls] == arguments


def test_tool_calls_are_text_where_none_were_offered(renderer: TemplateRenderer):
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parser = renderer.parser([], None)
    parser.feed(ids(renderer, text))
    parser.finish()
    assert parser.reply.content == text


def gather(deltas: list[ReplyDelta]) -> tuple[str, str, list[ToolCall]]:
    return (
        "".join(d.content for d in deltas),
        "".join(d.reasoning for d in deltas),
        [d.call for d in deltas if d.call],
    )


@pytest.mark.parametrize("stop", [(), ("☂",), ("an", "wer is")])
@pytest.mark.parametrize("seed", range(40))
def test_streaming_says_what_whole_parsing_says(renderer: TemplateRenderer, seed: int, stop: tuple[str, ...]):
    draw = random.Random(seed)
    vocabulary = renderer.tokenizer.core.get_vocab_size()
    count = draw.randrange(len(REPLIES) + 1)
    pieces = [ids(renderer, text) for text, *_ in REPLIES[:count]] + [
        [draw.randrange(3, vocabulary)] for _ in range(20)
    ]
    sampled = [token for _ in range(5) for token in draw.choice(pieces)]
    tools = draw.choice([None, TOOLS])
    whole = renderer.parser([], tools, stop)
    said = gather(whole.whole(sampled))
    split = renderer.parser([], tools, stop)
    deltas: list[ReplyDelta] = []
    while sampled:
        size = draw.randrange(1, 4)
        deltas += split.feed(sampled[:size])
        sampled = sampled[size:]
    deltas += split.finish()
    assert gather(deltas) == said
    assert split.reply == whole.reply
    assert said[0] == (whole.reply.content or "")


def test_a_prompt_that_opened_the_thoughts(renderer: TemplateRenderer):
    prompt = ids(renderer, "<|im_start|>assistant\n<think>\n")
    parser = renderer.parser(prompt, None)
    parser.feed(ids(renderer, "hm</think>yes"))
    parser.finish()
    assert (parser.reply.reasoning, parser.reply.content) == ("hm", "yes")


@pytest.mark.parametrize(
    ("pieces", "stops", "want"),
    [
        (["abc", "def"], ["cd"], "ab"),
        (["ab", "c", "x"], ["cd"], "abcx"),
        (["a\n", "\nb"], ["\n\n"], "a"),
        (["aab"], ["ab", "aa"], ""),
        (["hello"], [], "hello"),
        (["hel"], ["lo"], "hel"),
    ],
)
def test_stop_strings_are_cut(pieces: list[str], stops: list[str], want: str):
    cutter = StopCutter(stops)
    assert "".join([cutter.feed(piece) for piece in pieces] + [cutter.finish()]) == want
