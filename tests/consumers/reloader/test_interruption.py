"""New weights in the middle of requests, in both ways to interrupt: every token has the version that sampled it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import pytest

from consumers.reloader.vllm import VllmControl
from infra.bus.memory import MemoryBus
from producers.engines.base import Chunk, Sampling
from producers.engines.resubmit import ResubmittingEngine
from producers.engines.vllm import VllmEngine
from producers.gateway.serve import make_engine
from tests.consumers.reloader.conftest import ScriptedEngine, Start
from tests.support.announced import announce, weight_event
from tests.support.engines import LightEngine, differences, join, until

PROMPT = [22, 10, 14, 40]
EXACT = 1e-5
LENGTH = 400
CROWD = {"keep": 8, "abort": 4}
"""Requests at once, so that they take longer than this process may have to wait for a core."""
CHECKED = 4


async def test_the_reloader_interrupts_as_it_is_told(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    modes: list[str] = []
    pause = scripted.pause

    async def spy(mode: Literal["abort", "wait", "keep"] = "keep") -> None:
        modes.append(mode)
        await pause(mode)

    scripted.pause = spy
    announce(bus, weight_event(0, folders[0]))
    for mode in ("keep", "abort"):
        scripted.restart()
        async with start(scripted, interrupt=mode) as reloader:
            await until(lambda reloader=reloader: reloader.served == 0 and not scripted.paused)
    assert modes == ["keep", "abort"]


async def test_the_gateway_goes_on_where_requests_are_ended() -> None:
    kept, ended = (make_engine("http://127.0.0.1:1", resubmits=resubmits) for resubmits in (False, True))
    assert isinstance(kept, VllmEngine)
    assert isinstance(ended, ResubmittingEngine)
    assert ended.kind == kept.kind == "vllm"


@pytest.fixture(scope="module")
def light(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightEngine]:
    server = LightEngine(folders[0], tmp_path_factory.mktemp("light") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["light", pytest.param("vllm", marks=pytest.mark.vllm)])
async def control(request: pytest.FixtureRequest, folders: list[Path]) -> AsyncIterator[VllmControl]:
    made = VllmControl(request.getfixturevalue(request.param).url)
    yield made
    await made.pause("abort")
    await made.load(folders[0])
    await made.set_version("default")
    await made.reset_prefix_cache()
    await made.resume()
    await made.close()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_tokens_keep_their_versions(
    control: VllmControl,
    bus: MemoryBus,
    folders: list[Path],
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    stream: bool,
) -> None:
    engine = make_engine(control.url, resubmits=mode == "abort")
    asked: list[asyncio.Task[Chunk]] = []
    version, pause = 0, control.pause

    async def ask(number: int, begun: asyncio.Event) -> Chunk:
        chunks = []
        sampling = Sampling(LENGTH, ignore_eos=True, seed=number)
        async for chunk in engine.generate(PROMPT, sampling, request_id=f"{mode}-{stream}-{number}", stream=stream):
            chunks.append(chunk)
            begun.set()
        return join(chunks)

    async def pause_in_the_midst(how: Literal["abort", "wait", "keep"] = "keep") -> None:
        if version and not asked:
            begun = asyncio.Event()
            asked.extend(asyncio.create_task(ask(100 * version + n, begun)) for n in range(CROWD[mode]))
            if stream:
                await begun.wait()
            else:
                await asyncio.sleep(0.1)
        await pause(how)

    monkeypatch.setattr(control, "pause", pause_in_the_midst)
    announce(bus, weight_event(0, folders[0]))
    async with start(control, interrupt=mode) as reloader:
        await until(lambda: reloader.served == 0)
        for version in range(1, 9):  # on a busy machine some may not have begun, or have ended: then the next version
            asked.clear()
            announce(bus, weight_event(version, folders[version % 2]))
            await until(lambda version=version: reloader.served == version)
            replies = (await asyncio.gather(*asked))[:CHECKED]
            if all(len(reply.spans) == 2 for reply in replies):
                break
        for reply in replies:
            assert (len(reply.token_ids), reply.finish_reason) == (LENGTH, "length")
            assert [span.label for span in reply.spans] == [f"policy@{version - 1}", f"policy@{version}"]
            cut = reply.spans[1].start
            assert reply.spans[0] == (f"policy@{version - 1}", 0, cut)
            assert reply.spans[1].end == LENGTH
            before, after = (
                differences(folders[v % 2], PROMPT, reply.token_ids, reply.logprobs) for v in (version - 1, version)
            )
            assert max(before[:cut]) < EXACT
            assert max(after[cut:]) < EXACT
            assert max(after[:cut]) > 1e-2 < max(before[cut:]), "the versions differ"
    await engine.close()
