"""Whatever befalls engines, in whatever order: each reply is one draw, given once, labelled as it was drawn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.infra.engines.base import Chunk, Engine, Sampling, Usage, token_versions
from millrace.infra.errors import EngineError, EngineUnavailable
from millrace.producers.gateway.calls import fleet as fleets
from millrace.producers.gateway.calls.fleet import EngineTarget, Fleet
from millrace.producers.gateway.calls.relay import Relay
from millrace.producers.gateway.calls.routing import RouteWish
from tests.support.gateway_world import logprob, spans, status

URLS = tuple(f"http://engine-{number}.test" for number in range(3))
PROMPT = [1, 2, 3]
LENGTH = 12
FATES = ("dies", "hangs", "breaks", "is drained", "loads", "strays", "is slow", "ends its calls")


def next_token(before: Sequence[int]) -> int:
    """What the model says behind these tokens: a whole reply shows where one was lost or doubled."""
    return (sum(before) * 31 + len(before)) % 997


def whole_reply(prompt: Sequence[int]) -> list[int]:
    tokens = [*prompt]
    for _ in range(LENGTH):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Fated(Engine):
    """At its n-th token overall the n-th of `fates` befalls it, where that names one."""

    url: str
    fates: dict[int, str]
    version: int = 5
    policy: str = "policy"
    count: int = 0
    is_dead: bool = False
    hangs: bool = False
    is_draining: bool = False
    ends_calls: bool = False
    begun: list[bool] = field(default_factory=list)
    """of each call: whether it could begin one then"""
    fleet: Fleet | None = None
    labels: dict[str, list[int]] = field(default_factory=dict)
    """of each part that it sampled: the version of each token"""
    ends: set[str] = field(default_factory=set)
    """calls that it ended before their end, and labelled"""
    kind = "fated"

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, stream: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        self.begun.append(not self.is_draining)
        before, ids, labels = [*prompt_ids], [], []
        name = request_id.partition("-e")[0]
        versions = self.labels[name] = []
        rest = min(sampling.max_tokens, LENGTH - (len(prompt_ids) - len(PROMPT) - 1))
        for at in range(rest):
            await asyncio.sleep(0)
            await self._suffer()
            label = f"{self.policy}@{self.version}"
            before.append(next_token(before))
            ids.append(before[-1])
            labels.append(label)
            versions.append(self.version)
            is_last = at == rest - 1
            if not is_last and self.ends_calls:
                self.ends.add(name)
                last = ids[-1:] if stream else ids
                yield Chunk(
                    0, last, [0.0] * len(last), "abort", None, spans(labels), Usage(len(prompt_ids), len(ids), 0)
                )
                return
            if stream and not is_last:
                yield Chunk(0, [ids[-1]], [logprob(ids[-1], at)])
        last = ids[-1:] if stream else ids
        usage = Usage(len(prompt_ids), len(ids), 0)
        yield Chunk(0, last, [0.0] * len(last), "stop", None, spans(labels), usage)

    async def _suffer(self) -> None:
        fate = self.fates.pop(self.count, None)
        self.count += 1
        match fate:
            case "dies":
                self.is_dead = True
            case "hangs":
                self.hangs = True
            case "breaks":
                raise EngineUnavailable(f"{self.url} broke off")
            case "is drained":
                self.is_draining = True
                self.say()
            case "loads":
                self.version += 1
                self.say()
            case "strays":
                self.policy = "other"
            case "ends its calls":
                self.ends_calls = True
            case "is slow":
                await asyncio.sleep(0.05)
        if self.is_dead:
            raise EngineUnavailable(f"{self.url} is dead")
        while self.hangs:
            await asyncio.sleep(60)

    def say(self) -> None:
        assert self.fleet is not None
        self.fleet.observe({**status(self.version, url=self.url), "draining": self.is_draining})  # type: ignore[typeddict-item]

    async def health(self) -> bool:
        return not (self.hangs or self.is_dead)

    async def weight_version(self) -> str:
        return f"{self.policy}@{self.version}"

    async def close(self) -> None:
        pass


async def one_call(fleet: Fleet, number: int, *, stream: bool, has_grant: bool) -> tuple[list[Chunk], list[int] | None]:
    """Its chunks, and the versions that they must have; None where it came to no end."""
    chunks: list[Chunk] = []
    versions: list[int] = []
    name = f"call-{number}"

    def on_move(_: EngineTarget) -> None:
        count = sum(len(chunk.token_ids) for chunk in chunks)
        ends = [engine for engine in engines if name in engine.ends]
        versions.extend(ends[0].labels[name] if ends else [-1] * (count - len(versions)))
        assert len(versions) == count
        for engine in ends:
            engine.ends.remove(name)

    wish = RouteWish(has_grant, 5 if has_grant else 0, salt=str(number))
    engines = [target.engine for target in fleet.targets.values() if isinstance(target.engine, Fated)]
    prompt = [*PROMPT, number]
    try:
        target = await fleet.route(wish, 0.2)
        relay = Relay(fleet, target, wish, prompt, Sampling(100), name, on_move)
        async for chunk in relay.chunks(stream=stream):
            chunks.append(chunk)
            await asyncio.sleep(0)
    except EngineError:
        return chunks, None
    last = relay.target.engine
    assert isinstance(last, Fated)
    return chunks, versions + last.labels[name]


async def play(fates: list[dict[int, str]], calls: list[tuple[bool, bool]]) -> None:
    engines = {url: Fated(url, dict(fate)) for url, fate in zip(URLS, fates, strict=True)}
    fleet = Fleet("policy", engines.__getitem__, URLS, silence_s=0.02)
    for engine in engines.values():
        engine.fleet = fleet
        engine.say()
    tasks = [
        asyncio.create_task(one_call(fleet, number, stream=stream, has_grant=has_grant))
        for number, (stream, has_grant) in enumerate(calls)
    ]
    done, waiting = await asyncio.wait(tasks, timeout=3)
    for task in waiting:  # the only engine that is left hangs: its calls keep it
        task.cancel()
        assert any(engine.hangs for engine in engines.values())
    await asyncio.gather(*waiting, return_exceptions=True)
    for number, task in enumerate(tasks):
        if task not in done:
            continue
        chunks, versions = task.result()
        ids = [id for chunk in chunks for id in chunk.token_ids]
        reply = whole_reply([*PROMPT, number])
        assert ids == reply[: len(ids)], "lost, doubled or out of order"
        ends = [chunk for chunk in chunks if chunk.finish_reason is not None]
        assert len(ends) == int(versions is not None)
        if versions is None:
            continue
        if chunks[-1].finish_reason == "abort":  # and no other engine is there to go on
            reply = reply[: len(ids)]
        else:
            assert (ids, chunks[-1].finish_reason) == (reply, "stop")
        assert token_versions(chunks[-1].spans, len(reply), "policy").tolist() == versions
        usage = chunks[-1].usage
        assert usage is not None
        assert usage[:2] == (len(PROMPT) + 1, len(reply))
    for engine in engines.values():
        assert all(engine.begun), "a call began at an engine that was told to stop"
    assert [target.running for target in fleet.targets.values()] == [0] * len(URLS)
    await fleet.close()


FATE = st.dictionaries(st.integers(0, 3 * LENGTH), st.sampled_from(FATES), max_size=4)


@given(
    fates=st.lists(FATE, min_size=3, max_size=3),
    calls=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5),
)
@example(fates=[{4: "ends its calls"}] * 3, calls=[(True, False), (False, False), (True, True)])
@settings(max_examples=40, deadline=None)
def test_a_reply_is_one_draw_whatever_befalls_its_engines(
    fates: list[dict[int, str]], calls: list[tuple[bool, bool]]
) -> None:
    former, fleets.LOOK_S = fleets.LOOK_S, 0.01
    try:
        asyncio.run(play(fates, calls))
    finally:
        fleets.LOOK_S = former
