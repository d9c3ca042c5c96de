"""Arguments of a call while they are sampled: joined they are those of the whole reply, in every dialect, wherever the
tokens are cut; what turns out to be no call ends as the whole reply does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.dialects.all import by_name
from millrace.dialects.rendering.base import ReplyDelta
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.dialects.translation.base import ReplyFacts
from millrace.dialects.translation.reply import TranslatedCall
from millrace.producers.gateway.calls.choice import Choice
from tests.dialects.families import FAMILIES, write

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "Add."}
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text('{}"\\ü🙂[]:, a', max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(("a", '"', "}")), inner, max_size=2),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(("a", "b", "arguments")), VALUES, max_size=3)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """JSON text of arguments as a model may space it, whole for the most part."""
    made: dict[str, Any] = draw(OBJECTS)
    text = json.dumps(made, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from((None, None, 1))))
    if draw(st.integers(0, 5)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    return text + draw(st.sampled_from(("", "", "", " ", "}", "x")))


@st.composite
def hermes(draw: st.DrawFn) -> str:
    inner = draw(
        st.sampled_from(
            (
                '\n{{"name": "add", "arguments": {}}}\n',
                '{{"name":"add","arguments":{}}}',
                '{{"arguments": {}, "name": "add"}}',
                '{{"name": "add", "arguments": {}, "id": 3}}',
                '{{"name": "add", "arguments": {}, "arguments": {{}}}}',
                '{{"name": "a\\u0064d", "arguments": {}}}',
            )
        )
    )
    call = "<tool_call>" + inner.format(draw(texts())) + draw(st.sampled_from(("</tool_call>", "</tool_call>", "")))
    before = draw(st.sampled_from(("", "Hm. ", "<think>\nwhy\n</think>\n\n", "<think>")))
    return before + "\n".join([call] * draw(st.integers(1, 2)))


@st.composite
def harmony(draw: st.DrawFn) -> str:
    call = f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{draw(texts())}"
    return "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + call + draw(st.sampled_from(("<|call|>", "")))


@st.composite
def deepseek(draw: st.DrawFn) -> str:
    heads = ("<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>",)
    heads += ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>",)
    calls = "".join(draw(st.sampled_from(heads)).format(draw(texts())) for _ in range(draw(st.integers(1, 2))))
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


FORMS = {"hermes": hermes(), "gpt-oss": harmony(), "DeepSeek": deepseek()}


@pytest.fixture(params=["template", "packaged", "gpt-oss", "DeepSeek"])
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A renderer, and the replies of its form."""
    if request.param in ("template", "packaged"):
        from millrace.dialects.rendering.package import PackagedRenderer
        from tests.support import chat_tokenizer

        if request.param == "packaged":
            qwen3: Path = request.getfixturevalue("qwen3")
            return PackagedRenderer(ChatTokenizer(qwen3), "qwen3"), FORMS["hermes"]
        return TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path_factory.mktemp("h")))), FORMS["hermes"]
    family = next(family for family in FAMILIES if family.name.startswith(request.param))
    renderer = TemplateRenderer(ChatTokenizer(write(tmp_path_factory.mktemp("f"), family)))
    return renderer, FORMS[request.param]


laws = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def test_drafts_joined_are_the_arguments_of_the_whole_call(form: tuple[Any, Any]) -> None:
    renderer, replies = form
    prompt, counted = renderer.render([USER], None), {"drafts": 0, "broken": 0}

    @laws
    @given(text=replies, sizes=st.lists(st.integers(1, 9), min_size=1), noise=st.lists(st.integers(3, 255), max_size=2))
    def law(text: str, sizes: list[int], noise: list[int]) -> None:
        ids = renderer.tokenizer.encode(text)
        for id in noise:
            ids.insert(len(ids) * id // 256, id)
        whole = renderer.parser(prompt, TOOLS)
        assert not any(delta.draft for delta in whole.whole(ids))
        split, deltas, rest, turn = renderer.parser(prompt, TOOLS), list[ReplyDelta](), list(ids), 0
        while rest:
            size = sizes[turn % len(sizes)]
            deltas += split.feed(rest[:size])
            rest, turn = rest[size:], turn + 1
        deltas += split.finish()
        assert split.reply == whole.reply
        drafts = ""
        for delta in deltas:
            if delta.draft is not None:
                drafts += delta.draft.arguments
                assert delta.draft.arguments
                counted["drafts"] += 1
            elif delta.call is not None:
                assert delta.call.arguments.startswith(drafts)
                drafts = ""
            else:
                counted["broken"] += bool(drafts)
                drafts = ""
        assert not drafts, "a call that breaks off is followed by its text"

    law()
    assert counted["drafts"]


def stream(api: str, renderer: Any, text: str, size: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a reply in `size` tokens at once, and the response as the log has it."""
    field = {"input": "hi"} if api == "responses" else {"messages": [{"role": "user", "content": "hi"}]}
    dialect = by_name(api)
    ask = dialect.parse(orjson.dumps({"model": "m", "max_tokens": 9, **field}))
    call = TranslatedCall(ask, dialect.prefix, ReplyFacts("r"))
    choice: Any = Choice(0, renderer.parser(renderer.render([USER], None), TOOLS))
    call.choices = [choice]
    writer, ids, out = dialect.stream_writer(call), renderer.tokenizer.encode(text), list[Any]()
    for at in range(0, len(ids), size):
        new = ids[at : at + size]
        deltas = choice.parser.feed(new)
        deltas += choice.parser.finish() if at + size >= len(ids) else []
        out += writer.take(choice, [choice._part(delta) for delta in deltas], len(new))
    choice.finish = "stop"
    out += writer.end()
    events = [orjson.loads(event.data) for event in out if event.data != b"[DONE]"]
    return events, orjson.loads(dialect.record(call, choice))


def said_of(api: str, response: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The text of a recorded reply, and the arguments of its calls by their ids."""
    (reply,) = by_name(api).read(b'{"messages":[],"input":[]}', response).replies.values()
    calls = {call["id"]: call["function"]["arguments"] for call in reply.get("tool_calls", ())}
    assert len(calls) == len(reply.get("tool_calls", ()))
    return reply["content"] or "", calls


def streamed_calls(api: str, events: list[dict[str, Any]]) -> dict[str, str]:
    """What a client joins to the arguments of each call that began, by its id."""
    ids: dict[int, str] = {}
    made: dict[str, str] = {}
    for event in events:
        begun: list[tuple[int, str]] = []
        pieces: list[tuple[int, str]] = []
        if api == "chat":
            deltas = [call for choice in event["choices"] for call in choice["delta"].get("tool_calls", ())]
            begun = [(call["index"], call["id"]) for call in deltas if "id" in call]
            pieces = [(call["index"], call["function"]["arguments"]) for call in deltas]
        elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            begun = [(event["index"], event["content_block"]["id"])]
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            pieces = [(event["index"], event["delta"]["partial_json"])]
        elif event["type"] == "response.output_item.added" and event["item"]["type"] == "function_call":
            begun = [(event["output_index"], event["item"]["call_id"])]
        elif event["type"] == "response.function_call_arguments.delta":
            pieces = [(event["output_index"], event["delta"])]
        for index, id in begun:
            assert id not in made
            ids[index], made[id] = id, ""
        for index, piece in pieces:
            made[ids[index]] += piece
    return made


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_a_stream_puts_together_the_calls_of_the_whole_reply(form: tuple[Any, Any], api: str) -> None:
    renderer, replies = form
    counted = {"whole": 0, "broken": 0}

    @laws
    @given(text=replies, size=st.integers(1, 40))
    def law(text: str, size: int) -> None:
        events, response = stream(api, renderer, text, size)
        made, (content, calls) = streamed_calls(api, events), said_of(api, response)
        assert [id for id in made if id in calls] == [*calls], "each call begins once, in its place"
        for id, arguments in calls.items():
            # Whole they are JSON of the input in Messages, and the model's own text elsewhere.
            assert (json.loads(made[id]) == json.loads(arguments)) if api == "messages" else made[id] == arguments
        for id in made.keys() - calls.keys():
            assert made[id] in text, "what broke off was the model's own text"
            assert content, "and is text of the reply"
        counted["whole"] += len(calls)
        counted["broken"] += len(made) - len(calls)
        if api == "responses":
            last = events[-1]["response"]["output"]
            assert [item["arguments"] for item in last if item["type"] == "function_call"] == [*calls.values()]

    law()
    assert counted["whole"]
    assert counted["broken"]
