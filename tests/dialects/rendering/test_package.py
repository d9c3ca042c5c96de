"""The `renderers` package behind the seam: chosen where it writes as the template does, light, and believed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from renderers.base import ParsedResponse, ParsedToolCall

from millrace.dialects.rendering.base import NoContinuation, ParsedReply, ToolCall
from millrace.dialects.rendering.choose import PROBES, TOOLS, choose
from millrace.dialects.rendering.package import PackagedRenderer, has_renderer
from millrace.dialects.rendering.parsers.marker_parser import MarkedParser
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.errors import ConfigError
from tests.dialects.rendering.conftest import write
from tests.support import chat_tokenizer

USER = {"role": "user", "content": "What is 3 + 4?"}


@pytest.fixture(scope="module")
def renderer(qwen3: Path) -> PackagedRenderer:
    return PackagedRenderer(ChatTokenizer(qwen3), "qwen3")


def test_it_writes_what_the_template_writes(qwen3: Path, renderer: PackagedRenderer):
    template = TemplateRenderer(ChatTokenizer(qwen3))
    for probe in PROBES:
        assert renderer.render(probe, TOOLS) == template.render(probe, TOOLS)


def test_auto_knows_a_family_by_its_type_and_by_its_name(qwen3: Path, tmp_path: Path):
    found = choose(qwen3, "auto", tokenizer_hash="a", template_hash="b")
    assert isinstance(found, PackagedRenderer)
    assert (found.name, found.tokenizer_hash, found.template_hash) == ("qwen3", "a", "b")
    assert isinstance(choose(qwen3, "template"), TemplateRenderer)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).write_bytes((qwen3 / file).read_bytes())
    assert isinstance(choose(tmp_path, "auto"), TemplateRenderer)
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": "Qwen/Qwen3-0.6B"}))
    assert isinstance(choose(tmp_path, "auto"), PackagedRenderer)


def test_auto_leaves_a_changed_template_and_a_lacking_tokenizer_to_the_template(qwen3: Path, tmp_path: Path):
    changed, lacking = tmp_path / "changed", chat_tokenizer.write(tmp_path / "lacking")
    changed.mkdir()
    for file in qwen3.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    (changed / "chat_template.jinja").write_text(chat_tokenizer.TEMPLATE)
    (lacking / "config.json").write_text('{"model_type": "qwen3"}')
    assert isinstance(choose(changed, "auto"), TemplateRenderer)
    assert isinstance(choose(changed, "qwen3"), PackagedRenderer)
    assert isinstance(choose(lacking, "auto"), TemplateRenderer)
    with pytest.raises(ConfigError, match="does not fit this model: Special token '<tool_response>'"):
        choose(lacking, "qwen3")
    with pytest.raises(ConfigError, match=r"'harmony' is not supported: use auto, template or one of .*qwen3"):
        choose(lacking, "harmony")
    assert not any(map(has_renderer, ("default", "custom", "auto")))


def test_a_new_user_turn_is_refused_as_the_family_drops_thoughts(renderer: PackagedRenderer):
    stored = [*renderer.render([USER], None), *renderer.tokenizer.encode("Yes.<|im_end|>")]
    past = [USER, {"role": "assistant", "content": "Yes."}]
    refused = renderer.bridge(stored, past, [USER], None)
    assert refused == NoContinuation("the model's form drops earlier thoughts when the user speaks again")
    refused = renderer.bridge([*stored, 5], past, [{"role": "tool", "content": "7"}], None)
    assert refused == NoContinuation("the reply goes on behind its end token")
    refused = renderer.bridge(stored, past[:1], past[1:], None)
    assert refused == NoContinuation("the new messages hold a reply that was not sampled here")


def test_replies_equal_the_packages_own_reading(renderer: PackagedRenderer):
    draw = random.Random(0)
    prompt = renderer.render([USER], TOOLS)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 3.0}}\n</tool_call>'
    for _ in range(200):
        thought = draw.choice(["", "<think>\nhm\n</think>\n\n", "<think>\n", f"<think>{call} no</think>"])
        text = draw.choice(["", "Zürich ☂ ", "a\n\nb\n"]) + call * draw.randrange(3)
        sampled = [*renderer.tokenizer.encode(thought + text), 2]
        parser = renderer.parser(prompt, TOOLS)
        parser.whole(sampled)
        want = renderer.package.parse_response(sampled, tools=TOOLS, prompt_ids=prompt)
        assert (parser.reply.content or "") == want.content
        assert parser.reply.reasoning == ((want.reasoning_content or "").strip() or None)
        assert [(c.name, json.loads(c.arguments)) for c in parser.reply.calls] == [
            (c.name, c.arguments) for c in want.tool_calls
        ]


def test_what_the_package_reads_is_recorded_where_the_splitter_differs(renderer: PackagedRenderer):
    def read(ids: Sequence[int]) -> ParsedResponse:
        return ParsedResponse(
            "Hm.", "so", [ParsedToolCall(raw='{"name": "g", "arguments": {}}', name="g", arguments={})]
        )

    parser = MarkedParser(renderer.tokenizer, renderer.markers, tools={}, thinking=False, stop=(), read=read)
    sampled = renderer.tokenizer.encode('Hm.<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    said = [*parser.feed(sampled), *parser.finish()]
    assert [delta.call.name for delta in said if delta.call] == ["f", "g"]
    assert parser.reply == ParsedReply("Hm.", "so", [ToolCall("g", "{}")])


def test_stop_strings_cut_and_the_form_s_white_space_goes(renderer: PackagedRenderer):
    parser = renderer.parser([], None, stop=("b",))
    parser.whole(renderer.tokenizer.encode(" a b c"))
    assert parser.reply.content == "a"


def test_another_form_is_read_when_the_reply_is_whole(tmp_path: Path):
    tokens = (
        "<tool_response>",
        "</tool_response>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    renderer = PackagedRenderer(ChatTokenizer(write(tmp_path, tokens)), "qwen3.5")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "string"}}}}}]
    prompt = renderer.render([USER], tools)
    text = "Hm.</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    parser = renderer.parser(prompt, tools)
    assert parser.feed(renderer.tokenizer.encode(text)) == []
    parser.finish()
    assert parser.reply.reasoning == "Hm."
    assert [(call.name, json.loads(call.arguments)) for call in parser.reply.calls] == [("add", {"a": "3"})]


def test_no_torch_and_no_transformers_are_loaded(qwen3: Path):
    code = (
        "import sys; from pathlib import Path; import millrace.producers.gateway.serve;"
        "from millrace.dialects.rendering.choose import choose;"
        f"r = choose(Path({str(qwen3)!r}), 'auto'); p = r.render([{{'role': 'user', 'content': 'x'}}], None);"
        "r.parser(p, None).whole([5]); r.bridge([*p, 2], [], [{'role': 'tool', 'content': 'x'}], None);"
        "print(type(r).__name__, sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert out.stdout.split() == ["PackagedRenderer", "[]"]
