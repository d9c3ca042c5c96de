"""Published templates of the families people run: what goes on exactly, what opens a lineage, what is refused, and that
no call is left as text. `docs/templates.md` holds the table; to write it anew:
`python -m tests.dialects.rendering.test_families`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from millrace.dialects.rendering.base import NoContinuation, RenderError, ReplyDelta
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from tests.dialects.families import FAMILIES, Family, write

PAGE = Path(__file__).parents[3] / "docs" / "templates.md"
BEGIN, END = "<!-- families -->\n", "<!-- end -->\n"
KINDS = {"city": "string", "days": "integer", "exact": "boolean", "parts": "array", "limits": "object"}
PROPERTIES = {name: {"type": kind} for name, kind in KINDS.items()}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find a city.",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
]
USER = {"role": "user", "content": "What is 3 + 4? Zürich ☂"}
SAID = {"role": "assistant", "content": "It is 7."}
THOUGHT = {**SAID, "reasoning_content": "Three and four."}


def asked(*arguments: dict[str, Any], content: str = "", **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": "find", "arguments": json.dumps(given)}}
        for at, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def told(count: int) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": f"call_{at}", "name": "find", "content": "7"} for at in range(count)]


ONE, TWO = asked({"city": "Bern"}), asked({"city": "Bern"}, {"city": "Zürich", "days": 2})
ROWS: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]], Any]] = [
    ("user", [USER, SAID], [USER], None),
    ("user behind thoughts", [USER, THOUGHT], [USER], None),
    ("user, tools offered", [USER, SAID], [USER], TOOLS),
    ("result of a tool", [USER, ONE], told(1), TOOLS),
    ("result behind thoughts", [USER, {**ONE, "reasoning_content": "Hm."}], told(1), TOOLS),
    ("two results", [USER, TWO], told(2), TOOLS),
    ("developer, user", [{"role": "developer", "content": "Be brief."}, USER, SAID], [USER], None),
]


def own(family: Family, folder: Path) -> TemplateRenderer:
    """The family's own template, whatever a deployment takes."""
    return TemplateRenderer(ChatTokenizer(write(folder, family)))


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TemplateRenderer]:
    folder = tmp_path_factory.mktemp("families")
    return {family.name: own(family, folder / family.template) for family in FAMILIES}


def sampled(renderer: TemplateRenderer, past: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[int]]:
    """The prompt of a conversation, and its last reply as the template writes it, up to its end token. What a prompt
    has begun already, as thoughts, is not part of a reply."""
    prompt = renderer.render(past[:-1], tools)
    told = renderer._written.roles(past)
    whole = renderer.tokenizer.encode(renderer._text(told, tools, generate=False))
    behind = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    reply = whole[behind:]
    end = next((at for at, id in enumerate(reply) if id in renderer.stop_ids), None)
    return prompt, reply if end is None else reply[: end + 1]


def cell(renderer: TemplateRenderer, past: list[dict[str, Any]], new: list[dict[str, Any]], tools: Any) -> str:
    """What becomes of a conversation whose last reply a model wrote as its template does."""
    try:
        prompt, reply = sampled(renderer, past, tools)
        after = renderer.render([*past, *new], tools)
    except RenderError as error:
        return f"refused: {short(str(error))}"
    # Where the template writes no end token, the token of the next turn ends a reply.
    ends = [[]] if renderer.stop_ids & set(reply) else [[id] for id in sorted(renderer.stop_ids)]
    tried = [
        (stored, renderer.bridge(stored, past, new, tools)) for end in ends for stored in [[*prompt, *reply, *end]]
    ]
    for stored, added in tried:
        if not isinstance(added, NoContinuation):
            assert [*stored, *added] == after, "a bridge is what the template writes"
            return "exact"
    refused = tried[0][1]
    assert isinstance(refused, NoContinuation)
    return f"new lineage: {short(refused.reason)}"


WHYS = {
    "does not show them": "shows no tools",
    "writes no call in a form": "writes no calls",
    "single tool-calls": "one call a reply",
    "rewrites earlier": "rewrites the past",
    "in another way": "writes replies otherwise",
    "System role not supported": "no system text",
}


def short(reason: str) -> str:
    """A reason in the words of the table. Raises KeyError for one that is not among them."""
    return WHYS[next((part for part in WHYS if part in reason), reason)]


def table(renderers: dict[str, TemplateRenderer]) -> str:
    heads = ["family", "calls", *(name for name, *_ in ROWS)]
    lines = [heads, ["---"] * len(heads)]
    for family in FAMILIES:
        renderer = renderers[family.name]
        form = renderer.markers.form
        cells = [cell(renderer, past, new, tools) for _, past, new, tools in ROWS]
        lines.append([family.name, "none" if form is None else form.name, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page_with(found: str) -> str:
    head, _, rest = PAGE.read_text().partition(BEGIN)
    return head + BEGIN + found + END + rest.partition(END)[2]


def test_the_page_holds_what_the_templates_do(renderers: dict[str, TemplateRenderer]):
    assert page_with(table(renderers)) == PAGE.read_text(), f"run python -m {__spec__.name}" if __spec__ else ""


# ------------------------------------------------------------------ calls are read back

CALLING = [family for family in FAMILIES if family.name not in (
    "Llama 3", "DeepSeek R1 Distill", "Gemma 2", "Gemma 3", "Phi 3", "Phi 3.5", "Muse Glimmer"
)]  # fmt: skip
CLOSED = ("Qwen 3.5, not thinking",)
"""families whose prompt ends the thoughts, so that a reply has none"""
text = st.text(st.characters(codec="utf-8", exclude_characters="<>[]\r", exclude_categories=["Cc", "Cs"]), max_size=12)
plain = st.one_of(st.integers(-(10**6), 10**6), st.booleans(), st.none(), text)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": text,
        "days": st.integers(-999, 999),
        "exact": st.booleans(),
        "parts": st.lists(plain, max_size=3),
        "limits": st.dictionaries(st.from_regex("[a-z]{1,4}", fullmatch=True), plain, max_size=2),
    },
)


@pytest.mark.parametrize("family", CALLING, ids=lambda family: family.template)
@settings(max_examples=15, deadline=None)
@given(calls=st.lists(arguments, min_size=1, max_size=2), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_call_is_read_back_at_any_cut(
    renderers: dict[str, TemplateRenderer], family: Family, calls: list[dict[str, Any]], sizes: list[int]
):
    # LFM2's template puts quotes around a text and does not mind those within.
    assume(family.name != "LFM2.5" or not {"'", "\\"} & set(json.dumps(calls)))
    renderer = renderers[family.name]
    single = family.name.startswith(("Llama", "gpt-oss"))
    thoughts = {} if family.name in CLOSED else {"reasoning_content": "Hm."}
    reply = asked(*(calls[:1] if single else calls), **thoughts)
    try:
        prompt, ids = sampled(renderer, [USER, reply], TOOLS)
    except RenderError:
        assert family.name == "DeepSeek V3"  # it shows no tools; its calls are read where a template does
        prompt, ids = sampled(renderer, [USER, reply], None)
    parser, said, rest = renderer.parser(prompt, TOOLS), list[ReplyDelta](), list(ids)
    for size in sizes * len(ids):
        said, rest = said + parser.feed(rest[:size]), rest[size:]
        if not rest:
            break
    said += parser.finish()
    found = [(call.name, json.loads(call.arguments)) for call in parser.reply.calls]
    assert found == [("find", json.loads(call["function"]["arguments"])) for call in reply["tool_calls"]]
    assert not (parser.reply.content or "").strip(), "nothing of a call is told as text"
    assert [delta.call for delta in said if delta.call] == parser.reply.calls
    assert "".join(delta.content for delta in said) == (parser.reply.content or "")
    whole = renderer.parser(prompt, TOOLS)
    whole.whole(ids)
    assert whole.reply == parser.reply


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.template)
def test_thoughts_are_no_content(renderers: dict[str, TemplateRenderer], family: Family):
    renderer = renderers[family.name]
    prompt, ids = sampled(renderer, [USER, SAID if family.name in CLOSED else THOUGHT], None)
    parser = renderer.parser(prompt, None)
    parser.whole(ids)
    content = (parser.reply.content or "").strip()
    if family.name == "Muse Glimmer":
        assert "to=user" in content, "its channels are not known here: docs/templates.md says so"
    elif family.name == "DeepSeek V3" or family.name == "DeepSeek R1 Distill":
        assert "It is 7." in (
            content,
            (parser.reply.reasoning or "").strip(),
        )  # written without thoughts that it opened
    else:
        assert content == "It is 7."


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    PAGE.write_text(page_with(table({family.name: own(family, folder / family.template) for family in FAMILIES})))
