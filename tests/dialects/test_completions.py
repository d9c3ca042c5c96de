"""Legacy completions: the prompt's own tokens and no others, gone on with as they were sampled."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.rendering.parsers.plain_parser import PlainParser
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.process.offload import HEAVY
from millrace.producers.gateway.sessions.lineage import ITEM, MOST_RAW
from millrace.schemas.arrays import unpack
from tests.support.gateway_world import ScriptedEngine, World, world

ROOT = Path(__file__).parents[2]
SAYS = "<think>\nso\n</think>\n\nZürich 🙂<|im_end|>"


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode(SAYS))
    async with world(tmp_path, renderer, engine) as w:
        yield w


async def complete(w: World, prompt: Any, key: str = "x", **more: Any) -> Any:
    client = w.kept(openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key=key, max_retries=0))
    return await client.completions.create(model="m", prompt=prompt, **{"max_tokens": 100, **more})


async def test_the_engine_gets_the_tokens_of_the_prompt_and_no_others(w: World, renderer: TemplateRenderer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n"
    ids = renderer.encode(text)
    for prompt in (text, ids, [text], [ids]):
        await complete(w, prompt)
    assert [asked.prompt for asked in w.engine.asked] == [ids] * 4
    assert all(call["trainable"] for call in w.calls())
    # As at OpenAI, a reply has 16 tokens where nobody says how many.
    await w.http.post("/v1/completions", json={"model": "m", "prompt": text})
    assert w.engine.asked[-1].sampling.max_tokens == 16


async def test_a_session_says_how_many_tokens_a_reply_has_where_its_request_does_not(w: World) -> None:
    key = (await w.start(sampling={"max_tokens": 77}))["api_key"]
    for more, most in (({}, 77), ({"max_tokens": 5}, 5)):
        asked = {"model": "m", "prompt": "hi", **more}
        answer = await w.http.post("/v1/completions", json=asked, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        assert w.engine.asked[-1].sampling.max_tokens == most


async def test_a_prompt_that_is_too_long_is_that_of_the_request(w: World) -> None:
    for prompt in ("word " * 5000, [1] * 5000):
        with pytest.raises(openai.BadRequestError) as caught:
            await complete(w, prompt)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="no token") as caught:
        await complete(w, [2**31 - 1])
    assert caught.value.param == "prompt"


async def test_a_short_prompt_is_not_compared_with_long_ones_on_the_loop(
    w: World, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is decoded for a call is little, or decoded beside the loop."""
    key = (await w.start())["api_key"]
    for at in range(MOST_RAW):
        await complete(w, [*([1] * 300), at], key)
    decoded: list[int] = []
    decode = TemplateRenderer.decode

    def seen(self: TemplateRenderer, ids: Any) -> str:
        if threading.current_thread() is threading.main_thread():
            decoded.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(TemplateRenderer, "decode", seen)
    for prompt in ("hi", [1, 2]):
        await complete(w, prompt, key)
    assert sum(decoded) * ITEM < HEAVY


async def test_tokens_go_on_behind_tokens(w: World, renderer: TemplateRenderer) -> None:
    """Also where the reply was sampled otherwise than its text would be tokenized."""
    odd = [id for letter in "the answer" for id in renderer.encode(letter)] + renderer.encode("<|im_end|>")
    assert renderer.encode("the answer<|im_end|>") != odd
    w.engine.script = lambda *_: odd
    key, text = (await w.start())["api_key"], "hi:"
    for more in ("", "<|im_end|>\nmore:", "<|im_end|>\nstill:"):
        text += more
        text += (await complete(w, text, key)).choices[0].text
    stored = w.engine.asked[-1].prompt + odd
    await complete(w, [*stored, 1, 2], key)
    calls = w.calls()
    assert len({call["lineage"] for call in calls}) == 1
    assert [call["opened"] for call in calls] == ["it is the first call", None, None, None]
    for asked, call in zip(w.engine.asked, calls, strict=True):
        assert asked.prompt[call["prefix_len"] :] == unpack(call["prompt_ids"]).tolist()
    assert w.engine.asked[-1].prompt == [*stored, 1, 2]
    await complete(w, "hi", key)
    assert w.calls()[-1]["opened"] == "its prompt begins with no earlier one and its reply"


async def test_a_chat_of_the_same_words_goes_on_from_no_prompt_of_its_own(w: World) -> None:
    """In one session: what a template wrote and what none wrote are never one trace."""
    key = (await w.start())["api_key"]
    said = (await complete(w, "hi", key)).choices[0].text
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}, {"role": "user", "content": "x"}]
    assert (await w.chat(chat, key)).status_code == 200
    first, second = w.calls()
    assert (first["lineage"] != second["lineage"], second["prefix_len"]) == (True, 0)


async def test_log_probabilities_are_those_of_the_text(w: World, renderer: TemplateRenderer) -> None:
    w.engine.script = lambda *_: renderer.encode("The answer is\n 42.<|im_end|>")
    whole = (await complete(w, "hi", logprobs=0)).choices[0]
    (call,) = w.calls()
    told = whole.logprobs
    assert told.token_logprobs == pytest.approx(unpack(call["output_logprobs"]).tolist())
    assert "".join(told.tokens) == renderer.decode(unpack(call["output_ids"]).tolist())
    assert told.text_offset == [sum(map(len, told.tokens[:at])) for at in range(len(told.tokens))]
    pieces = [chunk.choices[0] async for chunk in await complete(w, "hi", logprobs=0, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    streamed = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    assert [one for piece in streamed for one in piece.tokens] == told.tokens
    assert [one for piece in streamed for one in piece.token_logprobs] == told.token_logprobs
    assert [len(piece.tokens) for piece in streamed] == [len(piece.text_offset) for piece in streamed]


PAGE = (ROOT / "docs" / "apis.md").read_text().partition("## Legacy completions")[2].partition("\n## ")[0]
REFUSED = re.findall(r"^\| `({.*})` \| (.*) \|$", PAGE, re.MULTILINE)
assert len(REFUSED) >= 6, "the table of what is refused has another form"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *((json.loads(asked), said) for asked, said in REFUSED),
        ({"prompt": []}, "prompt: at least one token is needed"),
        ({"prompt": [1, "b"]}, "prompt: one prompt a request"),
        ({"prompt": [-1]}, "Expected `int` >= 0"),
        ({"n": 0}, "n: must be 1 to 128"),
        ({"logit_bias": {"five": 1}}, "logit_bias: its names are token ids"),
        ({"logprobs": -1}, "Expected `int` >= 0"),
        ({"stop": [""]}, "stop: at most"),
    ],
    ids=str,
)
async def test_what_is_not_served_is_refused_with_the_reason(w: World, given: dict[str, Any], said: str) -> None:
    answer = await w.http.post("/v1/completions", json={"model": "m", "prompt": "hi", **given})
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text
    assert w.engine.asked == []


async def test_what_alters_sampling_is_labelled_as_in_chat(w: World) -> None:
    for more, label in (
        ({}, None),
        ({"temperature": 0}, "greedy"),
        ({"presence_penalty": 1}, "altered_sampling"),
        ({"logit_bias": {"3": 2}}, "altered_sampling"),
    ):
        await complete(w, "hi", **more)
        assert w.calls()[-1]["untrainable_reason"] == label


@settings(max_examples=60, deadline=None)
@given(
    st.text("ab🙂é<|im_end|>", max_size=12),
    st.lists(st.text("ab🙂", min_size=1, max_size=2), max_size=2),
    st.lists(st.integers(1, 6), max_size=6),
)
def test_a_plain_reply_is_the_same_however_it_comes(
    renderer: TemplateRenderer, text: str, stop: list[str], sizes: list[int]
) -> None:
    ids = renderer.encode(text)[:-1] or renderer.encode("a")
    whole, pieces = (
        PlainParser(renderer.tokenizer, renderer.stop_ids, stop),
        PlainParser(renderer.tokenizer, renderer.stop_ids, stop),
    )
    whole.whole(ids)
    said, rest = "", ids
    for size in [*sizes, len(ids)]:
        said += "".join(delta.content for delta in pieces.feed(rest[:size]))
        rest = rest[size:]
    said += "".join(delta.content for delta in pieces.finish())
    assert said == whole.reply.content == pieces.reply.content
    plain = renderer.tokenizer.decode(ids, skip_special_tokens=True)
    if not stop and not renderer.stop_ids & set(ids):
        assert said == plain
