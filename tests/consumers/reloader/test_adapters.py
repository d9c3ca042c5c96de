"""Versions that are adapters: a scripted engine for every decision, vLLM and SGLang for the numbers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from millrace.consumers.reloader.shell import base_of, stale_adapters
from millrace.infra.engines.base import Engine, LabelSpan, Sampling
from millrace.infra.engines.control import EngineControl, EngineState
from millrace.infra.engines.kind import AdapterRoom, LocalEngine
from millrace.infra.engines.kinds import KINDS, KindName
from millrace.infra.engines.sglang.launch import Sglang, adapter_arguments
from millrace.infra.engines.vllm.launch import Vllm
from millrace.infra.errors import EngineError, ReloadError
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.schemas.labels import is_base
from millrace.schemas.records import WeightVersion
from millrace.trainers.weights import checkpoint, lora
from millrace.trainers.weights.adapter import B, Lora
from tests.consumers.reloader.conftest import ScriptedEngine, Start
from tests.support.announced import announce, statuses, weight_event
from tests.support.engines import EVERY_POINT, KERNELS, complete, differences, join, until
from tests.support.tiny_model import write_model

LORA = Lora(rank=4, alpha=8, publish="adapter")


def write_base(root: Path, seed: int = 0) -> Path:
    """Version 0, full weights."""
    model = write_model(root / "model", seed)
    return checkpoint.write(root / "weights", 0, checkpoint.adopt(model)).path


def write_adapter(base: Path, version: int, kind: Lora = LORA) -> Path:
    """An adapter as a learner writes it; its B are random, so that every version differs from every other."""
    begun = lora.prepare(checkpoint.read(base), kind)
    assert begun.adapter is not None
    draw = torch.Generator().manual_seed(version)
    weights = {
        name: 0.3 * torch.randn(tensor.shape, generator=draw) if name.endswith(B) else tensor
        for name, tensor in begun.adapter.weights.items()
    }
    state = replace(begun, adapter=replace(begun.adapter, weights=weights))
    return checkpoint.write(base.parent, version, state).path


def adapter_event(version: int, folder: Path) -> WeightVersion:
    """Its event."""
    return {**weight_event(version, folder), "mode": "adapter"}


@torch.inference_mode()
def adapter_differences(
    folder: Path, prompt: Sequence[int], output: Sequence[int], logprobs: Sequence[float]
) -> list[float]:
    """|engine - plain forward with the adapter merged in| for each output token."""
    from transformers import AutoModelForCausalLM

    state = checkpoint.read(folder)
    assert state.adapter is not None
    model = AutoModelForCausalLM.from_pretrained(state.adapter.base, dtype=torch.float32).eval()
    model.load_state_dict(dict(lora.merge(state).weights))
    found = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return [abs(found[i, token].item() - value) for i, (token, value) in enumerate(zip(output, logprobs, strict=True))]


PROMPT = [22, 10, 14, 40]
EXACT = 1e-5


class AdaptableEngine(ScriptedEngine):
    """Serves adapters beside each other, as vLLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bad_adapters: set[str] = set()

    def restart(self) -> None:
        super().restart()
        self.names = []

    async def state(self) -> EngineState:
        found = await super().state()
        if not is_base(found.label):
            return found
        return EngineState(found.incarnation, self.names[-1] if self.names else found.label, found.paused, found.label)

    async def adapters(self) -> tuple[str, ...]:
        return tuple(self.names)

    async def load_adapter(self, name: str, folder: Path) -> None:
        self._call(f"adapter {name} {folder.name.partition('-')[0]}")
        if folder.name in self.bad_adapters:
            raise EngineError("the engine says 500")
        self.names = [*(other for other in self.names if other != name), name]

    async def unload_adapter(self, name: str) -> None:
        self._call(f"unload {name}")
        self.names.remove(name)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def versions(base: Path) -> dict[int, Path]:
    return {version: write_adapter(base, version) for version in range(1, 5)}


def laid(base: Path, label: str) -> list[str]:
    return ["pause", "label loading", f"load {base.name}", "reset", f"label {label}", "resume"]


async def test_the_base_is_laid_once_and_adapters_come_and_go(
    bus: MemoryBus, base: Path, versions: dict[int, Path], start: Start
) -> None:
    engine = AdaptableEngine()
    announce(bus, weight_event(0, base))
    announce(bus, adapter_event(1, versions[1]))
    async with start(engine, keep=2) as reloader:
        await until(lambda: reloader.served == 1)
        label = base_of(versions[1]).label
        assert engine.calls == [*laid(base, label), "adapter policy@1 v1"]
        for version in (2, 3, 4):
            announce(bus, adapter_event(version, versions[version]))
            await until(lambda version=version: reloader.served == version and len(engine.names) <= 2)
    assert engine.calls[7:] == [
        "adapter policy@2 v2",
        "adapter policy@3 v3",
        "unload policy@1",
        "adapter policy@4 v4",
        "unload policy@2",
    ]
    last = statuses(bus)[-1]
    assert last is not None
    assert (last["state"], last["version"], last["adapter"]) == ("serving", 4, "policy@4")


async def test_a_fresh_reloader_and_a_fresh_engine_find_their_way(
    bus: MemoryBus, base: Path, versions: dict[int, Path], start: Start
) -> None:
    engine = AdaptableEngine()
    announce(bus, adapter_event(1, versions[1]))
    async with start(engine) as reloader:
        await until(lambda: reloader.served == 1)
    done = len(engine.calls)
    async with start(engine) as reloader:
        await until(lambda: reloader.served == 1 and len(engine.calls) > done)
        assert engine.calls[done:] == ["adapter policy@1 v1"], "the base is there, and nothing is paused"
        engine.restart()
        await until(lambda: reloader.served == 1 and engine.names == ["policy@1"])
    assert engine.calls[done + 1 :] == [*laid(base, base_of(versions[1]).label), "adapter policy@1 v1"]


async def test_an_adapter_that_cannot_be_had_leaves_the_engine_alone(
    bus: MemoryBus, base: Path, versions: dict[int, Path], start: Start, tmp_path: Path
) -> None:
    engine = AdaptableEngine()
    engine.bad_adapters.add(versions[2].name)
    announce(bus, adapter_event(1, versions[1]))
    async with start(engine) as reloader:
        await until(lambda: reloader.served == 1)
        announce(bus, adapter_event(2, versions[2]))
        await until(lambda: any(status and "says 500" in (status["error"] or "") for status in statuses(bus)))
        assert reloader.served == 1
        assert not engine.paused
        announce(bus, adapter_event(3, versions[3]))
        await until(lambda: reloader.served == 3)
    assert engine.calls.count("pause") == 1


async def test_full_weights_after_adapters_take_them_off(
    bus: MemoryBus, base: Path, versions: dict[int, Path], folders: list[Path], start: Start
) -> None:
    engine = AdaptableEngine()
    announce(bus, adapter_event(1, versions[1]))
    async with start(engine) as reloader:
        await until(lambda: reloader.served == 1)
        done = len(engine.calls)
        announce(bus, weight_event(2, folders[1]))
        await until(lambda: reloader.served == 2)
    took = ["pause", "label loading", "unload policy@1", "abort", "load v1", "reset", "label policy@2", "resume"]
    assert engine.calls[done:] == took
    last = statuses(bus)[-1]
    assert last is not None
    assert last["adapter"] is None


async def test_an_engine_without_adapters_says_so(
    bus: MemoryBus, scripted: ScriptedEngine, versions: dict[int, Path], start: Start
) -> None:
    announce(bus, adapter_event(1, versions[1]))
    async with start(scripted) as reloader:
        await until(lambda: any(status and "serves no adapters" in (status["error"] or "") for status in statuses(bus)))
        assert reloader.served is None


def test_a_base_that_is_gone_or_changed_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path)
    folder = write_adapter(base, 1)
    about = json.loads((base / "config.json").read_bytes())
    (base / "config.json").write_text(json.dumps(about | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ReloadError, match="is not the base"):
        base_of(folder)
    (base / "config.json").unlink()
    with pytest.raises(ReloadError, match="cannot be had"):
        base_of(folder)


def test_what_no_request_can_need_goes() -> None:
    names = ["policy@1", "policy@2", "policy@3", "other@1", "tiny"]
    assert stale_adapters(names, "policy", 3, 2) == ["policy@1"]
    assert stale_adapters(names, "policy", 3, 9) == []


# ---- real servers


@pytest.fixture(
    scope="module",
    params=[pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)],
)
def server(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Vllm | Sglang]:
    if request.param == "sglang" and not EVERY_POINT:
        pytest.skip("SGLang has no server with adapters beside that of others: with MILLRACE_ENGINES=all")
    url, home = f"http://{LOCALHOST}:{free_ports(1)[0]}", tmp_path_factory.mktemp(f"{request.param}-adapters")
    running: Vllm | Sglang
    if request.param == "vllm":
        args = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "4", "--max-cpu-loras", "4")
        limits = {"max_model_len": 1024, "max_num_seqs": 32, "kv_cache_mb": 64}
        running = Vllm(home, url, str(base), "tiny", args=args, adapters=True, **limits)
    else:  # with what SGLang has for machines without its own kernels, which Millrace does not ask for
        args = (*adapter_arguments(AdapterRoom(8, 4)), "--lora-backend", "torch_native")
        running = Sglang(LocalEngine(home, url, str(base), "tiny", "cpu", 1024, 32, 64, args))
    with pytest.MonkeyPatch.context() as patch, running:
        if request.param == "sglang":
            patch.setenv("PYTHONPATH", str(KERNELS))
        running.start(600)
        yield running


@pytest.fixture
async def control(server: Vllm | Sglang) -> AsyncIterator[EngineControl]:
    made = KINDS[kind_of(server)].control(server.url, "")
    yield made
    for name in await made.adapters():
        await made.unload_adapter(name)
    await made.set_version("default")
    await made.close()


def kind_of(server: Vllm | Sglang) -> KindName:
    return "vllm" if isinstance(server, Vllm) else "sglang"


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_versions_are_served_beside_each_other(
    server: Vllm | Sglang, control: EngineControl, bus: MemoryBus, base: Path, versions: dict[int, Path], start: Start
) -> None:
    engines: list[Engine] = []

    def make(url: str) -> Engine:
        engines.append(KINDS[kind_of(server)].client(url, ""))
        return engines[-1]

    fleet = Fleet("policy", make)

    def told(version: int) -> bool:
        for status in statuses(bus):
            if status is not None:
                fleet.observe(status)
        return bool(engines) and engines[0].adapter == f"policy@{version}"

    announce(bus, weight_event(0, base))
    announce(bus, adapter_event(1, versions[1]))
    async with start(control, keep=2) as reloader:
        await until(lambda: reloader.served == 1 and told(1))
        (engine,) = engines
        (first,) = await complete(engine, PROMPT, Sampling(24, ignore_eos=True))
        assert first.spans == (LabelSpan("policy@1", 0, 24),)
        assert max(adapter_differences(versions[1], PROMPT, first.token_ids, first.logprobs)) < EXACT

        generated = engine.generate(PROMPT, Sampling(900, ignore_eos=True), request_id="long")
        async with aclosing(generated) as chunks:
            parts = [await anext(chunks)]
            announce(bus, adapter_event(2, versions[2]))
            await until(lambda: reloader.served == 2 and told(2))
            (second,) = await complete(engine, PROMPT, Sampling(24, ignore_eos=True), stream=False)
            announce(bus, adapter_event(3, versions[3]))
            await until(lambda: reloader.served == 3 and told(3))
            parts += [chunk async for chunk in chunks]
        whole = join(parts)
        assert whole.spans == (LabelSpan("policy@1", 0, 900),), "it ends with the adapter that it began with"
        assert max(adapter_differences(versions[1], PROMPT, whole.token_ids, whole.logprobs)) < EXACT
        assert second.spans == (LabelSpan("policy@2", 0, 24),)
        assert max(adapter_differences(versions[2], PROMPT, second.token_ids, second.logprobs)) < EXACT
        assert min(adapter_differences(versions[3], PROMPT, second.token_ids, second.logprobs)[1:]) > 0

        async def taken_off() -> bool:
            return set(await control.adapters()) == {"policy@2", "policy@3"}

        await until(taken_off)  # the old one goes after the acknowledgement

        engine.adapter = None
        (plain,) = await complete(engine, PROMPT, Sampling(24, ignore_eos=True))
        assert is_base(plain.spans[0].label), "tokens of the base alone belong to no version"
        assert max(differences(base, PROMPT, plain.token_ids, plain.logprobs)) < EXACT
    await fleet.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_an_engine_changes_its_base(
    server: Vllm | Sglang,
    control: EngineControl,
    bus: MemoryBus,
    versions: dict[int, Path],
    start: Start,
    tmp_path: Path,
) -> None:
    """Adapters of another base: the weights under them are replaced too, without a restart."""
    engine = KINDS[kind_of(server)].client(server.url, "")
    theirs = write_adapter(write_base(tmp_path, seed=1), 6)
    announce(bus, adapter_event(5, versions[1]))
    async with start(control) as reloader:
        await until(lambda: reloader.served == 5)
        announce(bus, adapter_event(6, theirs))
        await until(lambda: reloader.served == 6)
        assert await control.adapters() == ("policy@6",)
        engine.adapter = "policy@6"
        (found,) = await complete(engine, PROMPT, Sampling(24, ignore_eos=True))
        assert found.spans == (LabelSpan("policy@6", 0, 24),)
        assert max(adapter_differences(theirs, PROMPT, found.token_ids, found.logprobs)) < EXACT
    await engine.close()
