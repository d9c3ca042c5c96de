"""New weights in the middle of requests, in both ways to interrupt: every token has the version that sampled it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest

from millrace.infra.engines.base import Sampling
from millrace.infra.engines.control import EngineControl
from millrace.infra.engines.kinds import KINDS, KindName, open_engine
from millrace.infra.engines.resubmit import ResubmittingEngine
from millrace.infra.engines.vllm.engine import VllmEngine
from millrace.infra.log.memory.bus import MemoryBus
from tests.consumers.reloader.conftest import ScriptedEngine, Start
from tests.consumers.reloader.crowd import Crowd, check_versions
from tests.consumers.reloader.reloading import leave
from tests.support.announced import announce, weight_event
from tests.support.engines import EVERY_POINT, until

PROMPT = [22, 10, 14, 40]
EXACT = 1e-5
LENGTH = 400
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
    kept, ended = (open_engine("vllm", "http://127.0.0.1:1", resubmits=resubmits) for resubmits in (False, True))
    assert isinstance(kept, VllmEngine)
    assert isinstance(ended, ResubmittingEngine)
    assert ended.kind == kept.kind == "vllm"


@pytest.fixture(
    params=[
        "light",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ]
)
def shared(request: pytest.FixtureRequest) -> tuple[KindName, str]:
    """Kind and address of an engine."""
    kind: KindName = "inprocess" if request.param == "light" else request.param
    return kind, request.getfixturevalue(request.param).url


@pytest.fixture
async def control(shared: tuple[KindName, str], folders: list[Path]) -> AsyncIterator[EngineControl]:
    kind, url = shared
    made = KINDS[kind].control(url, "")
    yield made
    await leave(made, folders[0])


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_tokens_keep_their_versions(
    shared: tuple[KindName, str],
    control: EngineControl,
    bus: MemoryBus,
    folders: list[Path],
    start: Start,
    mode: str,
    stream: bool,
) -> None:
    if shared[0] != "inprocess" and not stream and not EVERY_POINT:
        pytest.skip("real engines: with MILLRACE_ENGINES=all")
    engine = open_engine(*shared, resubmits=mode == "abort")
    announce(bus, weight_event(0, folders[0]))
    async with start(control, interrupt=mode) as reloader:
        await until(lambda: reloader.served == 0)

        async def swap(version: int) -> None:
            announce(bus, weight_event(version, folders[version % 2]))
            await until(lambda: reloader.served == version, 240)

        async with Crowd(engine, PROMPT, Sampling(LENGTH, ignore_eos=True), stream=stream) as crowd:
            await crowd.meet(swap)
    for reply in [*crowd.swapped[:CHECKED], *crowd.replies[-CHECKED:]]:
        assert (len(reply.token_ids), reply.finish_reason) == (LENGTH, "length")
        check_versions(reply, PROMPT, folders[:2], EXACT)
    await engine.close()
