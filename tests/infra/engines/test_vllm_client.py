"""What the client of vLLM does when the other side misbehaves."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import orjson
import pytest

from millrace.infra.engines.base import Chunk, Grammar, LabelSpan, Sampling, Usage
from millrace.infra.engines.token_server import HEAVY
from millrace.infra.engines.vllm.engine import VllmEngine
from millrace.infra.errors import EngineError, EngineRejected, EngineTimeout, EngineUnavailable
from millrace.infra.process.net import free_ports
from millrace.schemas.bounds import NAME_BYTES
from tests.support.engines import complete
from tests.support.fake_http import Script, answer, hang_up, serving, stay_silent, stream


def choice(ids: list[int], finish: str | None = None, logprobs: int | None = None, index: int = 0) -> dict[str, object]:
    """One choice as vLLM writes it, unknown fields included."""
    content = [{"token_id": 1, "logprob": -0.5, "rank": 3, "top_logprobs": []}] * (
        len(ids) if logprobs is None else logprobs
    )
    spans = [{"version": "p@3", "start": 0, "end": 2}] if finish else None
    return {
        "index": index,
        "token_ids": ids,
        "finish_reason": finish,
        "routed_experts": None,
        "logprobs": {"content": content},
        "weight_versions": spans,
    }


def event(*choices: dict[str, object], **more: object) -> bytes:
    return b"data: " + orjson.dumps({"choices": choices, **more}) + b"\n\n"


USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
WHOLE = orjson.dumps({"choices": [choice([4, 5], "stop")], "usage": USAGE})
LONG = "s" * (NAME_BYTES + 1)
EVENTS = [event(choice([4])), event(choice([5], "stop")), event(usage=USAGE), b"data: [DONE]\n\n"]


SILENT = ("silent", "hangs in the middle")
"""Failures that only a timeout tells; the others must be told apart from one however busy the machine is."""


async def ask(url: str, streamed: bool, **options: float) -> list[object]:
    engine = VllmEngine(url, **{"patience_s": 0, **options})
    try:
        return list(await complete(engine, [1], Sampling(2), stream=streamed))
    finally:
        await engine.close()


@pytest.mark.parametrize(
    "parts",
    [EVENTS, [b"".join(EVENTS)], [bytes([byte]) for byte in b"".join(EVENTS)], [b": ping\n\n", *EVENTS]],
    ids=["whole", "joined", "bytewise", "with comments"],
)
async def test_a_stream_may_be_cut_anywhere(parts: list[bytes]) -> None:
    async with serving(stream(*parts)) as fake:
        (found,) = await ask(fake.url, True)
    assert (found.token_ids, found.logprobs) == ([4, 5], [-0.5, -0.5])
    assert (found.finish_reason, found.spans) == ("stop", (LabelSpan("p@3", 0, 2),))
    assert found.usage == Usage(1, 2, 1)


FAULT = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}
REFUSALS = {
    False: answer(orjson.dumps(FAULT), 500),
    True: stream(b"data: " + orjson.dumps(FAULT) + b"\n\n", b"data: [DONE]\n\n"),
}
"""how vLLM says that it cannot compile a grammar, by whether a stream was asked for"""


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_grammar_is_at_fault_where_the_engine_samples_without_it(streamed: bool) -> None:
    shaped = Sampling(2, grammar=Grammar("json", "{}"))
    for other, error in ((answer(WHOLE), EngineRejected), (answer(b"{}", 500), EngineUnavailable)):
        async with serving(REFUSALS[streamed], other) as fake:
            engine = VllmEngine(fake.url, patience_s=0)
            with pytest.raises(error) as raised:
                await complete(engine, [1, 2], shaped, stream=streamed)
            await engine.close()
        assert (getattr(raised.value, "status", None) == 400) == (error is EngineRejected)
        first, second = (orjson.loads(body) for _, body in fake.requests)
        assert "structured_outputs" in first["sampling_params"]
        assert "structured_outputs" not in second["sampling_params"]
        assert (second["token_ids"], second["sampling_params"]["max_tokens"]) == ([1, 2], 1)


async def test_without_a_grammar_and_behind_a_token_a_fault_is_the_engines() -> None:
    begun = stream(EVENTS[0], b"data: " + orjson.dumps(FAULT) + b"\n\n", b"data: [DONE]\n\n")
    for script, sampling in ((REFUSALS[True], Sampling(2)), (begun, Sampling(2, grammar=Grammar("json", "{}")))):
        async with serving(script, answer(WHOLE)) as fake:
            engine = VllmEngine(fake.url, patience_s=0)
            with pytest.raises(EngineUnavailable):
                await complete(engine, [1], sampling)
            await engine.close()
        assert len(fake.requests) == 1


FAILURES: dict[str, tuple[Script, type[EngineError]]] = {
    "400": (answer(b'{"error":{"message":"bad"}}', 400), EngineRejected),
    "404": (answer(b"no such route", 404), EngineRejected),
    "500": (answer(b'{"error":{"message":"EngineCore died"}}', 500), EngineUnavailable),
    "503": (answer(b"paused", 503), EngineUnavailable),
    "hung up": (hang_up, EngineUnavailable),
    "silent": (stay_silent, EngineTimeout),
    "not json": (answer(b"<html>"), EngineUnavailable),
    "wrong types": (answer(b'{"choices":"none"}'), EngineUnavailable),
    "no logprobs": (answer(orjson.dumps({"choices": [choice([4, 5], "stop", 0)]})), EngineUnavailable),
}
PLAIN_FAILURES: dict[str, tuple[Script, type[EngineError]]] = {
    "error in 200": (answer(b'{"error":{"message":"late","code":400}}'), EngineRejected),
    "no choice": (answer(b'{"choices":[]}'), EngineUnavailable),
    "unfinished": (answer(orjson.dumps({"choices": [choice([4, 5])]})), EngineUnavailable),
    **{
        f"long {name}": (
            answer(orjson.dumps({"choices": [choice([4, 5], "stop") | {name: value}], "usage": USAGE})),
            EngineUnavailable,
        )
        for name, value in {
            "finish_reason": LONG,
            "stop_reason": LONG,
            "weight_versions": [{"version": LONG, "start": 0, "end": 2}],
        }.items()
    },
}
STREAM_FAILURES: dict[str, tuple[Script, type[EngineError]]] = {
    "broken json": (stream(b"data: {]\n\n"), EngineUnavailable),
    "cut in the middle": (stream(EVENTS[0], then="cut"), EngineUnavailable),
    "hangs in the middle": (stream(EVENTS[0], then="hang"), EngineTimeout),
    "ends too early": (stream(EVENTS[0]), EngineUnavailable),
    "never done": (stream(*EVENTS[:3]), EngineUnavailable),
    "error event": (stream(EVENTS[0], b'data: {"error":{"message":"died","code":500}}\n\n'), EngineUnavailable),
    "refusal as an event": (stream(b'data: {"error":{"message":"bad","code":400}}\n\n'), EngineRejected),
    "fewer logprobs": (stream(event(choice([4, 5], "stop", 1))), EngineUnavailable),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("streamed", [True, False])
async def test_failures_have_names(name: str, streamed: bool) -> None:
    script, kind = FAILURES[name]
    async with serving(script) as fake:
        with pytest.raises(kind):
            await ask(fake.url, streamed, **({"idle_timeout_s": 0.3} if name in SILENT else {}))


@pytest.mark.parametrize("name", PLAIN_FAILURES)
async def test_failures_of_a_whole_answer_have_names(name: str) -> None:
    script, kind = PLAIN_FAILURES[name]
    async with serving(script) as fake:
        with pytest.raises(kind):
            await ask(fake.url, False)


@pytest.mark.parametrize("name", STREAM_FAILURES)
async def test_failures_of_a_stream_have_names(name: str) -> None:
    script, kind = STREAM_FAILURES[name]
    async with serving(script) as fake:
        with pytest.raises(kind):
            await ask(fake.url, True, **({"idle_timeout_s": 0.3} if name in SILENT else {}))


async def test_nobody_listens() -> None:
    with pytest.raises(EngineUnavailable, match="is the engine up") as caught:
        await ask("http://127.0.0.1:1", True)
    assert caught.value.status == 503, "it may be loading"
    engine = VllmEngine("http://127.0.0.1:1")
    assert not await engine.health()
    with pytest.raises(EngineUnavailable):
        await engine.weight_version()
    await engine.close()


async def test_a_request_waits_for_an_engine_that_starts() -> None:
    (port,) = free_ports(1)
    waiting = asyncio.create_task(ask(f"http://127.0.0.1:{port}", False, absent_patience_s=60))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    async with serving(answer(WHOLE), port=port) as fake:
        (found,) = await waiting
        assert found.token_ids == [4, 5]
        assert len(fake.requests) == 1


@pytest.mark.parametrize("first", [hang_up, answer(b"", 503), answer(b"", 429)], ids=["hung up", "503", "429"])
async def test_what_was_not_answered_is_sent_again(first: Script) -> None:
    async with serving(first, first, answer(WHOLE)) as fake:
        (found,) = await ask(fake.url, False, patience_s=60, busy_patience_s=60)
        assert found.token_ids == [4, 5]
        assert len(fake.requests) == 3
        assert len({body for _, body in fake.requests}) == 1


@pytest.mark.parametrize("name", ["500", "400", "not json"])
async def test_what_was_answered_is_not_sent_again(name: str) -> None:
    async with serving(FAILURES[name][0]) as fake:
        with pytest.raises(EngineError):
            await ask(fake.url, False, patience_s=20)
        assert len(fake.requests) == 1


async def test_a_stream_that_began_is_not_sent_again() -> None:
    async with serving(stream(EVENTS[0], then="cut")) as fake:
        with pytest.raises(EngineUnavailable):
            await ask(fake.url, True, patience_s=20)
        assert len(fake.requests) == 1


async def test_connections_are_used_again_only_when_an_answer_was_read_to_its_end() -> None:
    async with serving(stream(*EVENTS)) as fake:
        engine = VllmEngine(fake.url)
        for _ in range(3):
            await complete(engine, [1], Sampling(2))
        async with aclosing(engine.generate([1], Sampling(2), request_id="r")) as chunks:
            await anext(chunks)
        await engine.close()
    assert len(fake.requests) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 1, "temperature": -0.1},
        {"max_tokens": 1, "temperature": float("nan")},
        {"max_tokens": 1, "top_p": 0.0},
        {"max_tokens": 1, "top_k": -1},
        {"max_tokens": 1, "n": 0},
        {"max_tokens": 1, "stop": ("",)},
        {"max_tokens": 1, "top_logprobs": 20},
    ],
)
def test_sampling_that_no_engine_takes(wrong: dict[str, object]) -> None:
    with pytest.raises(EngineRejected):
        Sampling(**wrong)


async def test_an_adapter_is_asked_for_and_labels_its_tokens() -> None:
    def spans(*labels: str) -> bytes:
        found = choice([4, 5], "stop")
        found["weight_versions"] = [{"version": v, "start": at, "end": at + 1} for at, v in enumerate(labels)]
        return orjson.dumps({"choices": [found], "usage": USAGE})

    whole = [answer(spans("base:aa", "base:aa")), answer(spans("base:aa", "base:bb")), answer(spans("p@6", "p@6"))]
    async with serving(*whole) as fake:
        engine = VllmEngine(fake.url, "tiny", patience_s=0)
        engine.adapter = "p@7"
        found = [(await complete(engine, [1], Sampling(2), stream=False))[0].spans for _ in whole]
        await engine.close()
    assert [{span.label for span in each} for each in found] == [{"p@7"}, {"mixed"}, {"mixed"}]
    assert all(b'"model":"p@7"' in body for _, body in fake.requests)


async def test_an_adapter_that_is_gone_is_an_engine_that_is_not_ready() -> None:
    body = b'{"error":{"message":"The model `p@7` does not exist."}}'
    async with serving(answer(body, 404), answer(body, 404)) as fake:
        engine = VllmEngine(fake.url, patience_s=0)
        with pytest.raises(EngineRejected):
            await complete(engine, [1], Sampling(2))
        engine.adapter = "p@7"
        with pytest.raises(EngineUnavailable, match="no adapter p@7"):
            await complete(engine, [1], Sampling(2))
        await engine.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_long_is_read_beside_the_loop(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read, threads = VllmEngine._parse, []

    def told(self: VllmEngine, data: bytes, sampling: Sampling) -> tuple[list[Chunk], Usage | None]:
        threads.append((len(data) >= HEAVY, threading.current_thread() is threading.main_thread()))
        return read(self, data, sampling)

    monkeypatch.setattr(VllmEngine, "_parse", told)
    long = choice([4] * 2000, "stop")
    script = (
        stream(event(long), event(usage=USAGE), b"data: [DONE]\n\n")
        if streamed
        else answer(orjson.dumps({"choices": [long], "usage": USAGE}))
    )
    async with serving(script) as server:
        (chunk,) = await ask(server.url, streamed)
    assert isinstance(chunk, Chunk)
    assert (len(chunk.token_ids), chunk.usage) == (2000, Usage(1, 2, 1))
    assert threads == [(True, False), (False, True)][: 1 + streamed]
