"""The reloader with engines that are processes of their own: the light server, vLLM and SGLang."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from millrace.consumers.reloader import compose
from millrace.consumers.reloader.serve import end_engine
from millrace.infra.engines.base import Engine, Sampling
from millrace.infra.engines.control import EngineControl
from millrace.infra.engines.kinds import KINDS, KindName
from millrace.infra.engines.vllm.engine import VllmEngine
from millrace.infra.log.memory.bus import MemoryBus
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.hugging_face import OUTPUT, untie
from millrace.trainers.weights.state import State
from tests.consumers.reloader.conftest import Start
from tests.consumers.reloader.crowd import Crowd, check_versions
from tests.consumers.reloader.reloading import leave
from tests.support.announced import announce, statuses, weight_event
from tests.support.engines import LightEngine, complete, control_of, differences, join, until
from tests.support.tiny_model import write_manifest

pytestmark = pytest.mark.slow
PROMPT = [22, 10, 14, 40]
EXACT = 1e-5


@dataclass
class Rig:
    """A server under test."""

    engine: Engine
    control: EngineControl


KIND: dict[str, KindName] = {"light": "inprocess", "vllm": "vllm", "sglang": "sglang"}


@pytest.fixture(
    params=[
        "light",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ]
)
async def rig(request: pytest.FixtureRequest, folders: list[Path]) -> AsyncIterator[Rig]:
    server = request.getfixturevalue(request.param)
    kind = KINDS[KIND[request.param]]
    rig = Rig(kind.client(server.url, ""), kind.control(server.url, ""))
    yield rig
    await leave(rig.control, folders[0])
    await rig.engine.close()


async def test_versions_follow_events_in_mid_generation(
    rig: Rig, bus: MemoryBus, folders: list[Path], start: Start
) -> None:
    announce(bus, weight_event(0, folders[0]))
    async with start(rig.control) as reloader:
        await until(lambda: reloader.served == 0)
        (choice,) = await complete(rig.engine, PROMPT, Sampling(20, ignore_eos=True))
        assert max(differences(folders[0], PROMPT, choice.token_ids, choice.logprobs)) < EXACT

        async def swap(version: int) -> None:
            announce(bus, weight_event(version, folders[version % 2]))
            await until(lambda: reloader.served == version, 240)

        async with Crowd(rig.engine, PROMPT, Sampling(450, ignore_eos=True)) as crowd:
            await crowd.meet(swap)
    for reply in crowd.swapped:
        check_versions(reply, PROMPT, folders[:2], EXACT)


def made(folder: Path, state: State) -> Path:
    """A directory that events can name."""
    checkpoint.export(folder, state)
    write_manifest(folder)
    return folder


@pytest.fixture
def tied(folders: list[Path], tmp_path: Path) -> Path:
    """A model whose output matrix is its input embeddings, otherwise like those that the engines began with."""
    state = checkpoint.adopt(folders[1])
    config = json.loads(state.assets["config.json"]) | {"tie_word_embeddings": True}
    weights = {name: tensor for name, tensor in state.weights.items() if name != OUTPUT}
    assets = {**state.assets, "config.json": json.dumps(config).encode()}
    return made(tmp_path / "tied", replace(state, weights=weights, assets=assets))


def untied_versions(tied: Path, folder: Path) -> list[Path]:
    """Version 0 as `policy create --untie` makes it of a tied model, and one that was trained after it."""
    first = untie(checkpoint.adopt(tied))
    noise = torch.Generator().manual_seed(1)
    trained = {
        name: tensor + torch.randn(tensor.shape, generator=noise) * tensor.std() / 2
        for name, tensor in first.weights.items()
    }
    versions = [first, replace(first, weights=trained, step=1)]
    return [made(folder / f"v{at}", state) for at, state in enumerate(versions)]


async def test_a_model_that_was_tied_samples_with_each_new_version_of_its_own_head(
    rig: Rig, bus: MemoryBus, tied: Path, tmp_path: Path, start: Start
) -> None:
    """What vLLM on a CPU does wrongly for a tied model: it keeps the old output matrix, in silence."""
    versions = untied_versions(tied, tmp_path)
    async with start(rig.control) as reloader:
        replies = []
        for version, folder in enumerate(versions):
            announce(bus, weight_event(version, folder))
            await until(lambda version=version: reloader.served == version, 240)
            (reply,) = await complete(rig.engine, PROMPT, Sampling(20, ignore_eos=True))
            assert {span.label for span in reply.spans} == {f"policy@{version}"}
            assert max(differences(folder, PROMPT, reply.token_ids, reply.logprobs)) < EXACT
            replies.append(reply)
    assert max(differences(tied, PROMPT, replies[0].token_ids, replies[0].logprobs)) < EXACT, "the same at first"
    old_head = checkpoint.adopt(versions[1])
    kept = replace(old_head, weights={**old_head.weights, OUTPUT: checkpoint.adopt(versions[0]).weights[OUTPUT]})
    folder = made(tmp_path / "kept", kept)
    wrong = differences(folder, PROMPT, replies[1].token_ids, replies[1].logprobs)
    assert max(wrong) > 1000 * EXACT, "an engine that kept the old output matrix would be told from a right one"


@pytest.mark.parametrize("damage", ["vanished", "truncated"])
async def test_what_breaks_between_check_and_load_is_survived(
    rig: Rig,
    bus: MemoryBus,
    folders: list[Path],
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    copy = Path(shutil.copytree(folders[2], tmp_path / "copy"))
    event = weight_event(2, copy)
    check = compose.check

    def break_it(version: object, reference: object) -> object:
        found = check(version, reference)
        if found[0] == copy and damage == "vanished":
            shutil.rmtree(copy)
        elif found[0] == copy:
            (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-1000])
        return found

    monkeypatch.setattr(compose, "check", break_it)
    announce(bus, weight_event(1, folders[1]))
    async with start(rig.control) as reloader:
        await until(lambda: reloader.served == 1)
        async with aclosing(rig.engine.generate(PROMPT, Sampling(450, ignore_eos=True), request_id="r")) as chunks:
            parts = [await anext(chunks)]
            announce(bus, event)
            await until(lambda: any(s is not None and s["state"] == "failed" for s in statuses(bus)))
            parts += [chunk async for chunk in chunks]
        whole = join(parts)
        assert {span.label for span in whole.spans} == {"policy@1"}
        assert max(differences(folders[1], PROMPT, whole.token_ids, whole.logprobs)) < EXACT
        announce(bus, weight_event(3, folders[0]))
        await until(lambda: reloader.served == 3)
        (choice,) = await complete(rig.engine, PROMPT, Sampling(20, ignore_eos=True))
        assert max(differences(folders[0], PROMPT, choice.token_ids, choice.logprobs)) < EXACT


async def test_a_killed_engine_is_waited_for_and_brought_back(
    light: LightEngine, bus: MemoryBus, folders: list[Path], start: Start
) -> None:
    engine, control = VllmEngine(light.url, patience_s=60), control_of(light)
    announce(bus, weight_event(1, folders[1]))
    async with start(control) as reloader:
        await until(lambda: reloader.served == 1)
        first = statuses(bus)[-1]
        light.kill()
        await until(lambda: statuses(bus)[-1] is not None and statuses(bus)[-1]["state"] == "stopped")
        light.start()

        def back() -> bool:
            last = statuses(bus)[-1]
            return last is not None and last["state"] == "serving" and last["incarnation"] != first["incarnation"]

        await until(back)
        assert await engine.weight_version() == "policy@1"
        (choice,) = await complete(engine, PROMPT, Sampling(20, ignore_eos=True))
        assert max(differences(folders[1], PROMPT, choice.token_ids, choice.logprobs)) < EXACT
    await engine.close()
    await control.close()


async def test_an_engine_that_cannot_be_trusted_is_ended(
    light: LightEngine, bus: MemoryBus, folders: list[Path], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = compose.check
    monkeypatch.setattr(compose, "check", lambda event, reference: check(event, None))
    announce(bus, weight_event(0, folders[3]))
    announce(bus, weight_event(1, folders[3]))
    control = control_of(light)
    async with start(control, restart=partial(end_engine, light.url)) as reloader:
        await until(light.ended)
        announce(bus, weight_event(2, folders[2]))

        def back() -> bool:
            # As a supervisor does: a look at the new process may come before the reloader has read of version 2.
            if light.ended():
                light.start()
            return reloader.served == 2

        await until(back)
    await control.close()


def test_only_a_listener_of_this_machine_is_ended() -> None:
    assert end_engine("http://192.0.2.1:80") is None
    assert end_engine("http://127.0.0.1:1") is None
