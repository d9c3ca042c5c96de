"""A real engine process for benchmarks of weights that change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.infra.engines.control import EngineControl
from millrace.infra.engines.vllm.launch import Vllm
from millrace.infra.process.net import LOCALHOST, free_ports
from tests.support.engines import LightEngine, control_of

KINDS = ("light", "vllm")


@contextmanager
def served(kind: str, folder: Path, root: Path) -> Iterator[EngineControl]:
    """The control of an engine on the weights in `folder`: Millrace's own, or vLLM. root: for its files."""
    if kind == "light":
        light = LightEngine(folder, root / "log")
        try:
            light.start()
            yield control_of(light)
        finally:
            light.kill()
    else:
        address = f"http://{LOCALHOST}:{free_ports(1)[0]}"
        with Vllm(root, address, str(folder), "tiny", max_model_len=512, kv_cache_mb=64) as vllm:
            vllm.start()
            yield control_of(vllm)
