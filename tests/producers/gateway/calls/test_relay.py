"""A reply outlives the engine that began it: no token is lost, shown twice or wrongly labelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.base import Chunk, Sampling, token_versions
from millrace.infra.errors import EngineError, EngineRejected, EngineUnavailable
from millrace.producers.gateway.calls import fleet as fleets
from millrace.producers.gateway.calls.fleet import HANGS, EngineTarget, Fleet
from millrace.producers.gateway.calls.relay import Relay
from millrace.producers.gateway.calls.routing import RouteWish
from millrace.schemas.arrays import unpack
from tests.support.gateway_world import ScriptedEngine, status, world

ONE, TWO = "http://one.test", "http://two.test"
PROMPT = [1, 2, 3]
REPLY = list(range(10, 30))


def rest_of(prompt: list[int], *_: Any) -> list[int]:
    """What both engines say: the reply, from where the prompt stands."""
    return REPLY[len(prompt) - len(PROMPT) :]


class Pair:
    """Two engines of a fleet, `first` at version 3 and `second` at 4, and a call that begins at the first."""

    def __init__(self, silence_s: float = 0.05) -> None:
        self.first = ScriptedEngine(rest_of, "policy@3")
        self.second = ScriptedEngine(rest_of, "policy@4")
        self.fleet = Fleet("policy", {ONE: self.first, TWO: self.second}.__getitem__, (ONE, TWO), silence_s=silence_s)
        self.moves: list[str] = []
        for url, version in ((ONE, 3), (TWO, 4)):
            self.fleet.observe(status(version, url=url))  # type: ignore[arg-type]

    @property
    def target(self) -> EngineTarget:
        return self.fleet.targets[ONE]

    def relay(self, sampling: Sampling | None = None, **wish: Any) -> Relay:
        return Relay(
            self.fleet,
            self.target,
            RouteWish(**wish),
            PROMPT,
            sampling or Sampling(len(REPLY)),
            "call",
            lambda target: self.moves.append(target.url),
        )


async def read(relay: Relay, *, stream: bool = True) -> list[Chunk]:
    return [chunk async for chunk in relay.chunks(stream=stream)]


def ids_of(chunks: Sequence[Chunk]) -> list[int]:
    return [id for chunk in chunks for id in chunk.token_ids]


@given(broken=st.integers(0, len(REPLY) - 1), stream=st.booleans(), seed=st.none() | st.integers(-5, 5))
def test_another_engine_goes_on_behind_what_was_given(broken: int, stream: bool, seed: int | None) -> None:
    async def run() -> None:
        pair = Pair()
        pair.first.error, pair.first.break_after = EngineUnavailable("it was killed"), broken
        chunks = await read(pair.relay(Sampling(len(REPLY), seed=seed)), stream=stream)
        assert ids_of(chunks) == REPLY
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
        assert chunks[-1].finish_reason == "stop"
        given_before = broken if stream else 0
        versions = token_versions(chunks[-1].spans, len(REPLY), "policy").tolist()
        assert versions == [-1] * given_before + [4] * (len(REPLY) - given_before)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage[:2] == (len(PROMPT), len(REPLY))
        (asked,) = pair.second.asked
        assert asked.prompt == PROMPT + REPLY[:given_before]
        assert asked.sampling.max_tokens == len(REPLY) - given_before
        assert (asked.sampling.seed is None) == (seed is None)
        assert pair.moves == [TWO]
        assert pair.target.version is None, "it is doubted"
        assert [target.running for target in pair.fleet.targets.values()] == [0, 0]
        now = asyncio.get_running_loop().time()
        assert pair.target.speed.token_s(now) is None, "what broke off says nothing of its speed"
        assert pair.fleet.targets[TWO].speed.token_s(now)
        await pair.fleet.close()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [0, 1, 5])
async def test_another_engine_goes_on_where_one_ends_its_calls(count: int, *, stream: bool) -> None:
    """As one does that is told to shut down: what it sampled keeps its label."""
    pair = Pair()
    pair.first.script, pair.first.finish = (lambda *_: REPLY[:count]), "abort"
    chunks = await read(pair.relay(), stream=stream)
    assert ids_of(chunks) == REPLY
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert token_versions(chunks[-1].spans, len(REPLY), "policy").tolist() == [3] * count + [4] * (len(REPLY) - count)
    assert pair.moves == [TWO]
    pair.second.finish = "abort"
    chunks = await read(pair.relay(), stream=stream)
    assert chunks[-1].finish_reason == "abort", "there is no third engine"
    assert ids_of(chunks) == REPLY
    await pair.fleet.close()


@pytest.mark.parametrize(
    ("sampling", "wish"),
    [
        (Sampling(20, n=2), {}),
        (Sampling(20, stop=("x",)), {}),
        (Sampling(20, presence_penalty=1.0), {}),
        (Sampling(20), {"version": 3}),
    ],
    ids=["choices", "stop", "penalty", "version"],
)
async def test_what_is_not_one_draw_fails_once_a_token_was_given(sampling: Sampling, wish: Any) -> None:
    for broken, is_lost in ((0, False), (5, True)):
        pair = Pair()
        if "version" in wish:
            pair.fleet.observe(status(3, url=TWO))  # type: ignore[arg-type]
        pair.first.error, pair.first.break_after = EngineUnavailable("it was killed"), broken
        if is_lost:
            with pytest.raises(EngineUnavailable, match="killed"):
                await read(pair.relay(sampling, **wish))
            assert pair.second.asked == []
        else:
            assert ids_of(await read(pair.relay(sampling, **wish))) == REPLY * sampling.n
        await pair.fleet.close()


async def test_a_refusal_and_the_failure_of_the_last_engine_are_told() -> None:
    pair = Pair()
    pair.first.error = EngineRejected("the prompt is too long", 400)
    with pytest.raises(EngineRejected):
        await read(pair.relay())
    assert (pair.second.asked, pair.target.version) == ([], 3)
    pair.first.error = pair.second.error = EngineUnavailable("killed")
    with pytest.raises(EngineUnavailable):
        await read(pair.relay())
    assert pair.moves == [TWO]
    await pair.fleet.close()


async def test_an_engine_with_another_key_holds_nobody_up() -> None:
    pair = Pair()
    pair.first.error = EngineRejected("unauthorized", 401)
    assert ids_of(await read(pair.relay())) == REPLY
    pair.fleet.observe(status(3, url=ONE))  # type: ignore[arg-type]
    assert pair.fleet.best(RouteWish(former=ONE)) is pair.fleet.targets[TWO]
    await pair.fleet.close()


async def test_a_grant_goes_on_only_at_a_version_that_fits() -> None:
    pair = Pair()
    pair.fleet.observe(status(2, url=TWO))  # type: ignore[arg-type]
    pair.first.error, pair.first.break_after = EngineUnavailable("killed"), 3
    with pytest.raises(EngineUnavailable):
        await read(pair.relay(has_grant=True, minimum=3))
    assert pair.second.asked == []
    await pair.fleet.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_another_model_answers_nobody(stream: bool) -> None:
    pair = Pair()
    pair.first.label = "other@9"
    if stream:
        ends: list[str | None] = []

        async def read_on() -> None:
            async for chunk in pair.relay(Sampling(20, stop=("x",))).chunks(stream=True):
                ends.append(chunk.finish_reason)

        with pytest.raises(EngineUnavailable, match="serves other@9"):
            await read_on()
        assert set(ends) == {None}
    else:
        chunks = await read(pair.relay(), stream=False)
        assert set(token_versions(chunks[-1].spans, len(REPLY), "policy").tolist()) == {4}
        assert pair.moves == [TWO]
    # What its reloader says on changes nothing, until something else is loaded.
    for version, is_served in ((3, False), (5, True)):
        pair.fleet.observe(status(version, url=ONE))  # type: ignore[arg-type]
        best = pair.fleet.best(RouteWish(former=ONE))
        assert best is not None
        assert (best is pair.target) is is_served
    await pair.fleet.close()


class Frozen(ScriptedEngine):
    """Says nothing while it is frozen, also of its health."""

    frozen = True

    async def health(self) -> bool:
        return not self.frozen


@asynccontextmanager
async def hanging(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(fleets, "LOOK_S", 0.01)
    pair = Pair()
    pair.target.engine = pair.first = Frozen(rest_of, "policy@3")
    pair.first.gate = asyncio.Semaphore(4)
    yield pair
    await pair.fleet.close()


async def test_a_call_leaves_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hanging(monkeypatch) as pair:
        chunks = await asyncio.wait_for(read(pair.relay()), 30)
        assert ids_of(chunks) == REPLY
        assert token_versions(chunks[-1].spans, 20, "policy").tolist() == [-1] * 4 + [4] * 16
        assert (pair.target.trouble, pair.first.left_early) == (HANGS, 1)
        pair.fleet.observe(status(3, url=ONE))  # type: ignore[arg-type]
        assert pair.fleet.best(RouteWish(former=ONE)) is pair.fleet.targets[TWO]
        pair.first.frozen = False
        while pair.target.trouble:
            await asyncio.sleep(0.01)
        assert pair.fleet.best(RouteWish(former=ONE)) is pair.target


async def test_a_call_waits_for_one_that_is_busy_and_for_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for busy in (True, False):
        async with hanging(monkeypatch) as pair:
            pair.first.frozen = not busy
            if not busy:
                pair.fleet.targets.pop(TWO)
            reading = asyncio.create_task(read(pair.relay()))
            while pair.target.trouble != (HANGS if not busy else ""):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert not reading.done()
            pair.first.frozen = False
            for _ in REPLY:
                pair.first.gate.release()
            assert ids_of(await asyncio.wait_for(reading, 30)) == REPLY
            assert (pair.moves, pair.second.asked) == ([], [])


@pytest.mark.parametrize("reason", ["its status lapsed", "the other one does not answer"])
async def test_a_call_stays_where_it_is_served_and_leaves_for_nobody(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    async with hanging(monkeypatch) as pair:
        if reason == "its status lapsed":
            pair.first.frozen = False
            pair.target.expires_at = 1
            assert pair.target.is_away
        else:
            other = Frozen(rest_of, "policy@4")
            pair.fleet.targets[TWO] = EngineTarget(TWO, other, static=True)
        reading = asyncio.create_task(read(pair.relay()))
        while pair.target.trouble != ("" if reason == "its status lapsed" else HANGS):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        pair.first.frozen = False
        for _ in REPLY:
            pair.first.gate.release()
        assert ids_of(await asyncio.wait_for(reading, 30)) == REPLY
        assert (pair.moves, pair.second.asked) == ([], [])


async def test_who_leaves_ends_what_the_engine_does() -> None:
    pair = Pair()
    pair.first.gate = asyncio.Semaphore(4)
    reading = asyncio.create_task(read(pair.relay()))
    while not pair.first.gate.locked():
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (pair.first.left_early, pair.target.running, pair.second.asked) == (1, 0, [])
    await pair.fleet.close()


async def test_errors_of_the_engine_are_those_of_the_call() -> None:
    pair = Pair()
    pair.fleet.targets.pop(TWO)
    pair.first.error = EngineError("it failed")
    with pytest.raises(EngineError, match="it failed"):
        await read(pair.relay())
    await pair.fleet.close()


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "plain"])
async def test_a_granted_call_goes_on_and_trains_where_all_its_versions_are_known(
    tmp_path: Path, renderer: TemplateRenderer, streamed: bool
) -> None:
    said = renderer.tokenizer.encode("The answer is 42, as it always was.<|im_end|>")
    start = len(renderer.render([{"role": "user", "content": "hi"}], None, {}))
    engines = {url: ScriptedEngine(lambda prompt, *_: said[len(prompt) - start :]) for url in (ONE, TWO)}
    async with world(tmp_path, renderer, engines, patience_s=0.2) as w:
        for url, version in ((ONE, 3), (TWO, 4)):
            engines[url].label = f"policy@{version}"
            w.acknowledge(version, url=url)
        session = await w.start(ticket=1, min_version=3)
        fleet = w.gateway.engines.of("policy").fleet
        first, second = fleet.targets[ONE], fleet.targets[TWO]
        w.gateway.sessions.live[session["session"]].engines["policy"] = ONE
        engines[ONE].error, engines[ONE].break_after = EngineUnavailable("killed"), 5
        answer = await w.chat([{"role": "user", "content": "hi"}], session["api_key"], stream=streamed)
        assert answer.status_code == 200
        (call,) = w.calls()
        assert call["response"].decode().count("The answer is 42, as it always was.") == 1
        assert unpack(call["output_ids"]).tolist() == said
        assert unpack(call["output_versions"]).tolist() == [-1] * 5 * streamed + [4] * (len(said) - 5 * streamed)
        assert (call["trainable"], call["untrainable_reason"]) == (
            (False, "unknown_version") if streamed else (True, None)
        )
        assert call["engine_version"] == TWO
        share = {"engine": "scripted", "engine_version": ONE, "engine_incarnation": "one", "tokens": 5}
        assert call["earlier_engines"] == [share] * streamed
        assert (first.version, second.version) == (None, 4), "only who failed is doubted"
        engines[ONE].error = None
        assert (await w.chat([{"role": "user", "content": "hi"}], session["api_key"])).status_code == 200
        assert w.calls()[-1]["engine_version"] == TWO, "the session stays where it went"
        await fleet.close()
