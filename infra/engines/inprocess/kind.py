"""The engine of our own as a kind of engine: a process that samples with torch and transformers on the CPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from millrace.infra.engines.bearer import Key
from millrace.infra.engines.key_check import KEY
from millrace.infra.engines.kind import RECEIVER, Device, EngineKind, Launch, LocalEngine
from millrace.infra.process.net import LOCALHOST

if TYPE_CHECKING:
    from millrace.infra.engines.inprocess.control import InprocessControl
    from millrace.infra.engines.vllm.engine import VllmEngine


class InprocessKind(EngineKind):
    """`millrace.infra.engines.inprocess.server`."""

    name = "inprocess"

    def launch(self, engine: LocalEngine) -> Launch:
        address = urlsplit(engine.url)
        host = LOCALHOST if address.hostname in (None, "localhost") else address.hostname
        command = [sys.executable, "-P", "-m", "millrace.infra.engines.inprocess.server", "--model", engine.model]
        command += ["--host", str(host), "--port", str(address.port or 8901), "--served-model-name", engine.name]
        command += ["--receiver", RECEIVER] if engine.broadcasts else []
        return Launch([*command, *engine.args], {"OMP_NUM_THREADS": "1", KEY: engine.key})

    def runs_on(self, device: Device) -> str:
        return "cpu"

    def client(self, url: str, key: Key, absent_patience_s: float | None = None) -> VllmEngine:
        """vLLM's: requests for tokens are the one thing that the server takes in vLLM's form."""
        from millrace.infra.engines.vllm.engine import VllmEngine

        return VllmEngine(url, api_key=key, absent_patience_s=absent_patience_s)

    def control(self, url: str, key: Key, device: Device | None = None) -> InprocessControl:
        from millrace.infra.engines.inprocess.control import InprocessControl

        return InprocessControl(url, key=key)
