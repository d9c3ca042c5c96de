"""What a reply is held to is what the parser of the form reads: every grammar, walked token by token."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.conversation import Ask, ForcedCalls, ReplyShape
from millrace.dialects.errors import ApiError
from millrace.dialects.rendering.base import FormMarks
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.base import Grammar
from millrace.producers.gateway.calls.constraint import grammar_of
from millrace.schemas import bounds

PROMPT = "<|im_start|>assistant\n"
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "integer": st.integers(-999, 999),
    "boolean": st.booleans(),
    "string": st.text('abc <>/{}"\\\n_é', max_size=8),
    "array": st.lists(st.none(), max_size=3),
}
names = st.text('abc_-.é "<', min_size=1, max_size=6)


@pytest.fixture(scope="session")
def compiler(renderer: TemplateRenderer) -> xgrammar.GrammarCompiler:
    core = renderer.tokenizer.core
    words = [core.id_to_token(id) or "" for id in range(core.get_vocab_size())]
    kind = xgrammar.VocabType.BYTE_LEVEL
    info = xgrammar.TokenizerInfo(words, kind, stop_token_ids=[renderer.tokenizer.eos_token_id])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def asked(**fields: Any) -> Ask:
    return Ask(model="m", turns=[], **fields)


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def marks(renderer: TemplateRenderer, prompt: str = PROMPT) -> FormMarks:
    found = renderer.marks(renderer.tokenizer.encode(prompt))
    assert found is not None
    return found


def allows(compiler: xgrammar.GrammarCompiler, grammar: Grammar | None, ids: list[int]) -> bool:
    """Whether an engine that is held to the grammar may sample these ids, their end token included."""
    assert grammar is not None
    compiled = (
        compiler.compile_json_schema(grammar.text)
        if grammar.kind == "json"
        else compiler.compile_structural_tag(grammar.text)
    )
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(id) for id in ids) and matcher.is_terminated()


def pair(field: str, value: Any) -> tuple[str, Any]:
    return field, value


@st.composite
def called(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]:
    """Tools, and calls of them with arguments of their schemas."""
    tools, arguments = [], {}
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        kinds = draw(st.dictionaries(st.sampled_from("abc"), st.sampled_from(sorted(KINDS)), max_size=2))
        properties = {field: {"type": kind} for field, kind in kinds.items()}
        required = {"type": "object", "properties": properties, "required": list(kinds), "additionalProperties": False}
        tools.append(tool(name, required))
        arguments[name] = st.tuples(*(KINDS[kind].map(partial(pair, field)) for field, kind in kinds.items()))
    calls = [
        (name, dict(draw(arguments[name]))) for name in draw(st.lists(st.sampled_from(list(arguments)), min_size=1))
    ]
    return tools, calls[:3]


def block(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'  # noqa: E501


@settings(max_examples=60)
@given(data=called(), thought=st.none() | st.text("ab \n", max_size=6), several=st.booleans())
def test_forced_calls_are_what_the_parser_reads(
    renderer: TemplateRenderer, compiler: xgrammar.GrammarCompiler, data: Any, thought: str | None, several: bool
) -> None:
    tools, calls = data
    ask = asked(tools=tools, choice=ForcedCalls(), parallel=several)
    said = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
    ids = renderer.tokenizer.encode(said + "\n".join(block(*call) for call in calls) + "<|im_end|>")
    assert allows(compiler, grammar_of(ask, marks(renderer)), ids) == (several or len(calls) == 1)
    parser = renderer.parser([], tools)
    parser.whole(ids)
    assert [(call.name, json.loads(call.arguments)) for call in parser.reply.calls] == calls
    named = asked(tools=tools, choice=ForcedCalls((calls[0][0],)))
    assert allows(compiler, grammar_of(named, marks(renderer)), ids) == (len(calls) == 1)


@pytest.mark.parametrize(
    ("reply", "free", "beside_tools", "forced"),
    [
        ('{"a": 3}', True, True, False),
        ('{"a": "x"}', False, False, False),
        ("It is 3.", False, False, False),
        ("", False, False, False),
        ('<think>\nhm\n</think>\n\n{"a": 3}', True, True, False),
        ('<think>\nhm{"a": 3}', False, False, False),
        (block("f", {"a": 3}), False, True, True),
        (block("f", {"a": "x"}), False, False, False),
        (block("g", {"a": 3}), False, False, False),
        ("Well. " + block("f", {"a": 3}), False, False, False),
    ],
)
def test_a_reply_is_json_or_calls_and_nothing_else(
    renderer: TemplateRenderer,
    compiler: xgrammar.GrammarCompiler,
    reply: str,
    free: bool,
    beside_tools: bool,
    forced: bool,
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"n": {"type": "integer"}},
    }
    ids, output = renderer.tokenizer.encode(reply + "<|im_end|>"), ReplyShape("response_format", schema)
    tools = [tool("f", schema)]
    here = marks(renderer)
    assert allows(compiler, grammar_of(asked(output=output), here), ids) == free
    assert allows(compiler, grammar_of(asked(output=output, tools=tools), here), ids) == beside_tools
    assert allows(compiler, grammar_of(asked(output=output, tools=tools, choice="none"), here), ids) == free
    assert allows(compiler, grammar_of(asked(output=output, tools=tools, choice=ForcedCalls()), here), ids) == forced


@pytest.mark.parametrize(
    ("prompt", "reply", "allowed"),
    [
        (PROMPT + "<think>\n", 'hm\n</think>\n\n{"a": 3}', True),
        (PROMPT + "<think>\n", '{"a": 3}', False),
        (PROMPT + "<think>\n\n</think>\n\n", '{"a": 3}', True),
        (PROMPT + "<think>\n\n</think>\n\n", '<think>\nhm\n</think>\n\n{"a": 3}', False),
        ("<think>\na\n</think>\nb<|im_end|>\n" + PROMPT, '<think>\nhm\n</think>\n\n{"a": 3}', True),
    ],
)
def test_thoughts_come_where_the_prompt_leaves_or_opens_them(
    renderer: TemplateRenderer, compiler: xgrammar.GrammarCompiler, prompt: str, reply: str, allowed: bool
) -> None:
    grammar = grammar_of(asked(output=ReplyShape("response_format")), marks(renderer, prompt))
    assert allows(compiler, grammar, renderer.tokenizer.encode(reply + "<|im_end|>")) == allowed


def test_a_form_without_thoughts_is_held_by_the_schema_alone(renderer: TemplateRenderer) -> None:
    bare = marks(renderer)._replace(think=None, think_end=None, call=None, call_end=None)
    grammar = grammar_of(asked(output=ReplyShape("response_format", {"type": "integer"})), bare)
    assert grammar == Grammar("json", '{"type": "integer"}')
    assert grammar_of(asked(tools=[tool("f", {})]), bare) is None


def test_what_cannot_be_held_to_is_refused(renderer: TemplateRenderer) -> None:
    here, forced = marks(renderer), asked(tools=[tool("f", {})], choice=ForcedCalls())
    long = {"enum": ["x" * bounds.SCHEMA_BYTES]}
    many = {"properties": {f"{at}": {"patternProperties": {f"^{at}": {}}} for at in range(bounds.PATTERNS + 1)}}
    odd = {"items": [{"pattern": "x" * (bounds.PATTERN_BYTES + 1)}]}
    for ask, found, said in (
        (forced, None, "tool_choice: replies of this model's form"),
        (asked(output=ReplyShape("text.format")), None, "text.format: replies of this model's form"),
        (forced, here._replace(call=None), "in Hermes form alone"),
        (asked(output=ReplyShape("text.format", long)), here, f"more than {bounds.SCHEMA_BYTES}"),
        (asked(output=ReplyShape("text.format", many)), here, f"9 patterns are more than {bounds.PATTERNS}"),
        (asked(tools=[tool("f", many)], choice=ForcedCalls()), here, "9 patterns are more"),
        (
            asked(tools=[tool("f", odd)], choice=ForcedCalls()),
            here,
            f"a pattern has at most {bounds.PATTERN_BYTES} bytes",
        ),
        (asked(tools=[{"type": "function"}], choice=ForcedCalls()), here, "a function has a name"),
        (asked(tools=[tool("f", [1])], choice=ForcedCalls()), here, "a function has a name"),
    ):
        with pytest.raises(ApiError, match=said.replace(".", r"\.")) as error:
            grammar_of(ask, found)
        assert error.value.status == 400
