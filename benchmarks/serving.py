"""A real engine process for benchmarks of weights that change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.infra.engines.base import Engine
from millrace.infra.engines.control import EngineControl
from millrace.infra.engines.kind import LocalEngine
from millrace.infra.engines.kinds import KINDS as ENGINES
from millrace.infra.engines.kinds import KindName
from millrace.infra.engines.sglang.launch import Sglang
from millrace.infra.engines.vllm.launch import RECEIVE, Vllm
from millrace.infra.process.net import LOCALHOST, free_ports
from tests.support.engines import KERNELS, LightEngine, control_of

KINDS: dict[str, KindName] = {"light": "inprocess", "vllm": "vllm", "sglang": "sglang"}
"""by the names of the arguments"""


@contextmanager
def served(kind: str, folder: Path, root: Path) -> Iterator[EngineControl]:
    """The control of an engine on the weights in `folder`: Millrace's own, vLLM or SGLang. root: for its files."""
    address = f"http://{LOCALHOST}:{free_ports(1)[0]}"
    if kind == "light":
        light = LightEngine(folder, root / "log")
        try:
            light.start()
            yield control_of(light)
        finally:
            light.kill()
    elif kind == "vllm":
        with Vllm(root, address, str(folder), "tiny", max_model_len=512, kv_cache_mb=64, args=RECEIVE) as vllm:
            vllm.start()
            yield control_of(vllm)
    else:
        os.environ["PYTHONPATH"] = str(KERNELS)
        with Sglang(LocalEngine(root, address, str(folder), "tiny", max_model_len=512, kv_cache_mb=64)) as sglang:
            sglang.start()
            yield ENGINES["sglang"].control(address, "")


def client_of(kind: str, control: EngineControl) -> Engine:
    """Who samples from an engine that `served` began."""
    return ENGINES[KINDS[kind]].client(control.url, "")
