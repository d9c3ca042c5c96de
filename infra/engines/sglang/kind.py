"""SGLang as a kind of engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.infra.engines.bearer import Key
from millrace.infra.engines.kind import Device, EngineKind, Launch, LocalEngine

if TYPE_CHECKING:
    from millrace.infra.engines.sglang.control import SglangControl
    from millrace.infra.engines.sglang.engine import SglangEngine


class SglangKind(EngineKind):
    """SGLang's server, of the environment that `make setup ENGINE=sglang` makes, or of ours."""

    name = "sglang"
    packages = ("sglang",)
    serves_adapters = True

    def launch(self, engine: LocalEngine) -> Launch:
        from millrace.infra.engines.sglang.launch import Sglang

        service = Sglang(engine)
        service.prepare()
        return Launch(service.command(), service.environment())

    def runs_on(self, device: Device) -> str:
        from millrace.infra.engines.sglang.launch import device_here

        return device_here(device)

    def client(self, url: str, key: Key, absent_patience_s: float | None = None) -> SglangEngine:
        from millrace.infra.engines.sglang.engine import SglangEngine

        return SglangEngine(url, api_key=key, absent_patience_s=absent_patience_s)

    def control(self, url: str, key: Key, device: Device | None = None) -> SglangControl:
        from millrace.infra.engines.sglang.control import SglangControl

        return SglangControl(url, key=key)
