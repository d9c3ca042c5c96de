"""Engines for tests: the light server as a process, a direct control of the in-process engine, plain-forward checks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch

from millrace.infra.engines.base import Chunk, Engine, Sampling
from millrace.infra.engines.control import EngineControl, EngineState, PauseMode
from millrace.infra.engines.inprocess.engine import InprocessEngine
from millrace.infra.engines.inprocess.wire import ServerState
from millrace.infra.engines.kinds import KINDS
from millrace.infra.engines.vllm.launch import Vllm
from millrace.infra.process.net import LOCALHOST, free_ports

START_S = 300
EVERY_POINT = os.environ.get("MILLRACE_ENGINES") == "all"
"""whether real engines meet every fault that the light one meets"""
KERNELS = Path(__file__).parent / "sglang_cpu"
"""what stands in for SGLang's kernels for CPUs, which no registry has"""


class LightEngine:
    """`millrace.infra.engines.inprocess.server` as a process of its own; `start` again after `kill` keeps the port.
    `args`: more arguments."""

    def __init__(self, model: Path, log: Path, args: Sequence[str] = ()) -> None:
        self.model = model
        self.args = args
        self.url = f"http://{LOCALHOST}:{free_ports(1)[0]}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it answers."""
        command = [sys.executable, "-m", "millrace.infra.engines.inprocess.server", "--model", str(self.model)]
        command += ["--port", self.url.rpartition(":")[2], "--served-model-name", "tiny", *self.args]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, "the light engine did not start"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        assert self._process is not None
        return self._process

    def state(self) -> ServerState:
        """What it says of itself."""
        return msgspec.json.decode(httpx.get(f"{self.url}/state", timeout=60).content, type=ServerState)

    def serves(self, label: str) -> bool:
        """Whether it samples, under this label."""
        state = self.state()
        return state.label == label and not state.paused

    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process is None or self._process.poll() is not None

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False


def control_of(server: LightEngine | Vllm) -> EngineControl:
    """The control of a server's kind."""
    return KINDS["inprocess" if isinstance(server, LightEngine) else "vllm"].control(server.url, "")


class DirectControl(EngineControl):
    """An in-process engine controlled without a wire."""

    url = "inprocess:"

    def __init__(self, engine: InprocessEngine) -> None:
        self._engine = engine

    async def state(self) -> EngineState:
        return EngineState("1", await self._engine.weight_version(), self._engine.paused)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def load(self, folder: Path) -> None:
        await self._engine.load(folder)

    async def set_version(self, label: str) -> None:
        await self._engine.set_version(label)

    async def reset_prefix_cache(self) -> bool:
        return await self._engine.reset_prefix_cache(reset_running_requests=True)

    async def abort(self, request_ids: Sequence[str] = ()) -> int:
        return await self._engine.abort(request_ids)

    async def close(self) -> None:
        """The engine is not ours."""


@cache
def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def plain_logprobs(folder: Path, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Log-softmax of a plain forward at every output position, float32 [len(output), vocabulary]."""
    logits = _model(folder)(torch.tensor([[*prompt, *output]])).logits[0]
    found: torch.Tensor = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return found


@torch.inference_mode()
def ending_prompt(folder: Path, token: int) -> list[int]:
    """A prompt after which the model's most likely token is `token`."""
    tails = torch.arange(3, 512)
    for first in range(3, 512):
        prompts = torch.stack([torch.full_like(tails, first), tails], 1)
        found = (_model(folder)(prompts).logits[:, -1].argmax(-1) == token).nonzero()
        if len(found):
            return [first, int(tails[found[0, 0]])]
    raise AssertionError(f"no short prompt leads to {token}")


def differences(folder: Path, prompt: Sequence[int], output: Sequence[int], logprobs: Sequence[float]) -> list[float]:
    """|engine - plain forward| for each output token."""
    plain = plain_logprobs(folder, prompt, output)
    return [abs(plain[i, token].item() - value) for i, (token, value) in enumerate(zip(output, logprobs, strict=True))]


def join(chunks: Sequence[Chunk]) -> Chunk:
    """The chunks of one choice as one."""
    whole = Chunk(chunks[0].index, [], [], tops=[])
    for chunk in chunks:
        assert whole.finish_reason is None, "a chunk followed the last one"
        whole.token_ids += chunk.token_ids
        whole.logprobs += chunk.logprobs
        whole.tops = [*whole.tops, *chunk.tops]
        whole.finish_reason, whole.stop_reason = chunk.finish_reason, chunk.stop_reason
        whole.spans, whole.usage = chunk.spans, chunk.usage or whole.usage
    return whole


async def complete(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, *, stream: bool = True, request_id: str = "test"
) -> list[Chunk]:
    """All choices of one request, each as one chunk, by index."""
    parts: dict[int, list[Chunk]] = {}
    async for chunk in engine.generate(prompt, sampling, request_id=request_id, stream=stream):
        parts.setdefault(chunk.index, []).append(chunk)
    return [join(parts[index]) for index in sorted(parts)]


async def until(condition: Any, timeout_s: float = 240) -> None:
    """Poll an async or plain condition until it holds."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, "it did not become true"
        await asyncio.sleep(0.02)
