"""Real engine processes die and freeze under 64 clients: every reply comes whole, once, and rightly labelled. For `make
engines`: in `make test` the fleet of vLLM and SGLang stands for it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.engines.base import Engine
from millrace.infra.engines.kinds import open_engine
from millrace.schemas.arrays import unpack
from tests.producers.gateway.calls.whole_replies import ask, check_replies
from tests.support.engines import EVERY_POINT, LightEngine, control_of
from tests.support.gateway_world import world
from tests.support.tiny_model import write_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not EVERY_POINT, reason="with MILLRACE_ENGINES=all")]
CLIENTS = 64
LENGTH = 500
VERSIONS = (3, 4)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LightEngine]]:
    """Two processes with weights of their own; the test that kills one comes last."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("engines")
    out = [LightEngine(write_model(folder / f"v{v}", v), folder / f"{v}.log") for v in VERSIONS]
    for engine in out:
        engine.start()
    yield out
    for engine in out:
        if not engine.ended():
            engine.process.send_signal(signal.SIGCONT)
        engine.kill()


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
async def test_no_reply_is_lost_doubled_or_mislabelled(
    tmp_path: Path, engines: list[LightEngine], fault: signal.Signals
) -> None:
    renderer = TemplateRenderer(ChatTokenizer(engines[0].model))
    clients: dict[str, Engine] = {one.url: open_engine("inprocess", one.url, resubmits=False) for one in engines}
    for version, engine in zip(VERSIONS, engines, strict=True):
        control = control_of(engine)
        await control.set_version(f"policy@{version}")
        await control.close()
    async with world(tmp_path, renderer, clients) as w:
        for version, engine in zip(VERSIONS, engines, strict=True):
            w.acknowledge(version, url=engine.url)
        calls = [asyncio.create_task(ask(w.http, number, LENGTH)) for number in range(CLIENTS)]
        fleet = w.gateway.engines.of("policy").fleet
        victim, other = (fleet.targets[engine.url] for engine in engines)
        while victim.running + other.running < CLIENTS:
            assert not any(call.done() for call in calls), "make replies longer"
            await asyncio.sleep(0.05)
        assert victim.running >= CLIENTS / 4, "both engines have their share"
        engines[0].process.send_signal(fault)
        replies = await asyncio.gather(*calls)
        records = {call["response_id"]: call for call in w.calls()}
        assert len(w.calls()) == len(records) == CLIENTS == len({reply.id for reply in replies})
        folders = dict(zip(VERSIONS, (engine.model for engine in engines), strict=True))
        unlabelled = check_replies(
            replies, records, renderer.tokenizer, LENGTH, folders.__getitem__, before=VERSIONS[0]
        )
        assert any(unlabelled), "some streams were in the middle"
        for call in records.values():
            assert call["engine_version"] == engines[VERSIONS.index(unpack(call["output_versions"])[-1])].url
        assert (victim.running, other.running) == (0, 0)
        late = await ask(w.http, 1, LENGTH)
        assert (late.status, w.calls()[-1]["engine_version"]) == (200, other.url), "it gets no call any more"
        if fault == signal.SIGSTOP:
            engines[0].process.send_signal(signal.SIGCONT)
            while victim.trouble:
                await asyncio.sleep(0.05)
        await fleet.close()
