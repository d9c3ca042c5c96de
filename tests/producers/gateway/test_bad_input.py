"""What the listener answers to what it cannot serve: always an OpenAI error, never a trace in the log."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from millrace.dialects.rendering.template import TemplateRenderer
from tests.support.documents import ROOT
from tests.support.gateway_world import ScriptedEngine, World, world

pytestmark = pytest.mark.asyncio(loop_scope="module")

M = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": M}).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def w(tmp_path_factory: pytest.TempPathFactory, renderer: TemplateRenderer) -> AsyncIterator[World]:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("x<|im_end|>"))
    folder = tmp_path_factory.mktemp("gateway")
    async with world(folder, renderer, engine, max_body_bytes=100_000, max_model_len=256) as w:
        yield w


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": M, **fields}


def calls(**call: Any) -> list[dict[str, Any]]:
    return [*M, {"role": "assistant", "content": "", "tool_calls": [call]}]


TOOLS = [{"type": "function", "function": {"name": "f"}}]


def schema(given: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": given}}


TABLE: list[tuple[str, str, Any, int, str]] = [
    ("malformed JSON", CHAT, b'{"model": "m", "messages": [', 400, "not valid JSON"),
    ("no JSON at all", CHAT, b"\xff\x00", 400, "not valid JSON"),
    ("no UTF-8 in a field that nobody reads", CHAT, BODY[:-1] + b', "x": "\xff"}', 400, "not valid JSON"),
    ("empty body", CHAT, b"", 400, "not valid JSON"),
    ("not an object", CHAT, b"[1]", 400, "Expected `object`"),
    ("no messages field", CHAT, {"model": "m"}, 400, "messages"),
    ("no model", CHAT, {"messages": M}, 400, "model"),
    ("no message", CHAT, chat(messages=[]), 400, "at least one message"),
    ("wrong type", CHAT, chat(temperature="hot"), 400, "Expected `float | null`"),
    ("wrong role", CHAT, chat(messages=[{"role": "robot", "content": "x"}]), 400, "Invalid enum value 'robot'"),
    ("wrong content", CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "Expected"),
    ("image", CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "Only text content"),
    ("text part without text", CHAT, chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400, "Only"),
    ("call without name", CHAT, chat(messages=calls(function={})), 400, "name"),
    ("temperature", CHAT, chat(temperature=-1), 400, "temperature"),
    ("top_p", CHAT, chat(top_p=2), 400, "top_p"),
    ("max_tokens", CHAT, chat(max_tokens=0), 400, "max_tokens"),
    ("n", CHAT, chat(n=1000), 400, "must be 1 to 128"),
    ("empty stop", CHAT, chat(stop=[""]), 400, "stop"),
    ("top_logprobs alone", CHAT, chat(top_logprobs=3), 400, "needs logprobs"),
    ("penalty", CHAT, chat(presence_penalty=2.5), 400, "presence_penalty must be -2 to 2"),
    ("repetition penalty", CHAT, chat(repetition_penalty=0), 400, "repetition_penalty must be 0.000001 to 2"),
    ("min_p", CHAT, chat(min_p=1.5), 400, "min_p must be 0 to 1"),
    ("bias", CHAT, chat(logit_bias={"5": 101}), 400, "numbers from -100 to 100"),
    ("bias of no token", CHAT, chat(logit_bias={"five": 1}), 400, "its names are token ids"),
    ("too many biases", CHAT, chat(logit_bias={str(id): 1 for id in range(1025)}), 400, "at most 1024 tokens"),
    ("forced without tools", CHAT, chat(tool_choice="required"), 400, "only where tools are offered"),
    ("no such tool", CHAT, chat(tools=TOOLS, tool_choice={**TOOLS[0], "function": {"name": "g"}}), 400, "no tool 'g'"),
    ("custom tool", CHAT, chat(tools=[*TOOLS, {"type": "custom", "custom": {"name": "g"}}]), 400, "not 'custom'"),
    ("odd choice", CHAT, chat(tools=TOOLS, tool_choice={"type": "custom"}), 400, "auto, none, required"),
    (
        "odd schema",
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"schema": 5}}),
        400,
        "a schema is",
    ),
    ("no schema", CHAT, chat(response_format={"type": "json_schema"}), 400, "holds a name and a schema"),
    ("long schema", CHAT, chat(response_format=schema({"enum": ["x" * 70_000]})), 400, "more than 65536"),
    ("too long for the model", CHAT, chat(messages=[{"role": "user", "content": "x y " * 500}]), 400, "longer than"),
    ("too large", CHAT, b" " * 100_001, 413, "larger than 100000 bytes"),
    ("session of nobody", "/v1/sessions/none/end", {}, 404, "There is no session none here"),
    ("start: unknown field", "/v1/sessions", {"tiket": 1}, 400, "unknown field `tiket`"),
    ("start: bad sample", "/v1/sessions", {"group_size": 2, "sample": 2}, 400, "sample is out of range"),
    ("start: endless group", "/v1/sessions", {"group": "ü" * 101}, 400, "group is out of range"),
    ("start: bad split", "/v1/sessions", {"split": "test"}, 400, "Invalid enum value 'test'"),
    ("start: bad budget", "/v1/sessions", {"budget": {"dollars": 1}}, 400, "Invalid enum value 'dollars'"),
    ("start: bad replay", "/v1/sessions", {"replay": "always"}, 400, "Invalid enum value 'always'"),
    ("start: bad parent", "/v1/sessions", {"parent": "nobody"}, 404, "There is no session nobody here"),
    ("events: unknown kind", "/v1/sessions/S/events", {"events": [{"kind": "model_call"}]}, 400, "Invalid value"),
    ("events: no list", "/v1/sessions/S/events", {"kind": "observation"}, 400, "unknown field"),
    ("events: missing", "/v1/sessions/S/events", {"events": [{"kind": "tool_call"}]}, 400, "missing required field"),
    ("reward: not a number", "/v1/sessions/S/reward", {"value": "good"}, 400, "Expected `float | null`"),
    ("reward: too confident", "/v1/sessions/S/reward", {"value": 1, "confidence": 2}, 400, "<= 1"),
    ("reward: bad signal", "/v1/sessions/S/reward", {"value": 1, "signal": "vibes"}, 400, "Invalid enum value 'vibes'"),
    ("reward: bad target", "/v1/sessions/S/reward", {"value": 1, "target_kind": "moon"}, 400, "Invalid enum value"),
    ("end: bad status", "/v1/sessions/S/end", {"status": "great"}, 400, "Invalid enum value 'great'"),
    ("slash behind a path", f"{CHAT}/", chat(), 404, "Not Found"),
    ("wrong method", "/health", {}, 405, "Method Not Allowed"),
    ("wrong path", "/v1/moderations", {}, 404, "Not Found"),
]


PAGE = (ROOT / "docs" / "apis.md").read_text().partition("## Not supported")[2].partition("\n## ")[0]

REFUSED = re.findall(r"^\| `({.*})` \| (.*) \|$", PAGE, re.MULTILINE)
assert len(REFUSED) >= 19, "the table of what is not supported has another form"


@pytest.mark.parametrize(("given", "message"), REFUSED)
async def test_what_the_page_calls_unsupported_is_refused_as_it_says(w: World, given: str, message: str):
    fields = json.loads(given)
    answer = await w.http.post(CHAT, json=chat(**fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"] == message


async def test_what_the_page_calls_without_effect_is_accepted(w: World):
    names = re.findall(r"`(\w+)`", PAGE.partition("without any effect")[2].partition("\n\n")[0])
    values = {"metadata": {}, "store": True, "parallel_tool_calls": True}
    assert len(names) == 8
    answer = await w.http.post(CHAT, json=chat(**{name: values.get(name, "x") for name in names}))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", re.findall(r"`POST (/\S+)`", PAGE))
async def test_routes_that_the_page_calls_missing_are_missing(w: World, path: str):
    assert (await w.http.post(path, json={})).status_code == 404


@pytest.mark.parametrize(("path", "body", "status", "message"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE])
async def test_bad_input(w: World, path: str, body: Any, status: int, message: str):
    if "/S/" in path:
        path = path.replace("S", (await w.start())["session"])
    before = len([e for e in w.events() if e["kind"] != "episode_started"])
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await w.http.post(path, content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error"), answer.text
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len([e for e in w.events() if e["kind"] != "episode_started"]) == before
    assert (await w.http.post(CHAT, json=chat())).status_code == 200


async def test_a_body_without_a_length_is_cut_off_too(w: World):
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 1000

    answer = await w.http.post(CHAT, content=endless())
    assert answer.status_code == 413


async def test_non_finite_numbers_are_no_json(w: World):
    assert (await w.http.post(CHAT, content=b'{"model":"m","messages":[],"temperature":NaN}')).status_code == 400
    answer = await w.http.post("/v1/sessions", content=b'{"task": Infinity}')
    assert answer.status_code == 400


async def test_unicode_that_is_none(w: World):
    body = b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}'
    answer = await w.http.post(CHAT, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content"
    # Within the text of arguments only the template meets it.
    asked = calls(id="c", type="function", function={"name": "f", "arguments": '{"a": "\\ud800"}'})
    answer = await w.http.post(
        CHAT, json=chat(messages=[*asked, {"role": "tool", "tool_call_id": "c", "content": "7"}])
    )
    assert answer.status_code == 400
    assert "tool call's arguments" in answer.json()["error"]["message"]


async def test_the_last_of_two_fields_of_one_name_counts(w: World):
    first, last = ([{"role": "user", "content": text}] for text in ("one", "two"))
    body = f'{{"model": "m", "messages": {json.dumps(first)}, "messages": {json.dumps(last)}}}'
    assert (await w.http.post(CHAT, content=body)).status_code == 200
    text = w.gateway.engines.of("policy").renderer.tokenizer.decode(w.engine.asked[-1].prompt)
    assert ("one" in text, "two" in text) == (False, True)


async def test_special_tokens_in_a_text_are_the_model_s(w: World):
    ids = []
    for text in ("a", "a<|im_end|>"):
        assert (await w.http.post(CHAT, json=chat(messages=[{"role": "user", "content": text}]))).status_code == 200
        ids.append(w.engine.asked[-1].prompt)
    (end,) = w.gateway.engines.of("policy").renderer.tokenizer.encode("<|im_end|>")
    assert ids[1].count(end) == ids[0].count(end) + 1


async def test_there_is_no_cors(w: World):
    asks = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    for path in (CHAT, "/v1/messages", "/v1/sessions", "/health"):
        answer = await w.http.options(path, headers=asks)
        assert answer.status_code == 405
        answers = [answer, await w.http.post(path, json={}, headers=asks)]
        assert not [name for one in answers for name in one.headers if name.startswith("access-control")]
