"""One SGLang server on this machine, in an environment of its own: its pins are none of ours.

Invariants: nothing is downloaded; its caches stay in `home`; the key is in no command line, but in a file that only its
owner reads. On a CPU it needs SGLang's kernels for CPUs, which no registry has: whoever built them, or has what stands
in for them, names their directory in PYTHONPATH."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx

from millrace.infra import durable
from millrace.infra.engines.kind import AdapterRoom, Device, LocalEngine
from millrace.infra.engines.sglang.worker import RESERVE
from millrace.infra.errors import ServiceError
from millrace.infra.process.cuda import usable
from millrace.infra.process.service import Service

PYTHON = Path(__file__).parents[3] / ".venv-sglang" / "bin" / "python"
"""of the environment that `make setup ENGINE=sglang` makes"""
BYTES_OF_TOKEN = 4096
"""rough memory of one token in the cache of a model that a CPU serves"""
FEWEST_TOKENS = 4096


class Sglang(Service):
    """A server of `engine`."""

    name = "sglang"

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__(engine.home)
        self.url = engine.url.rstrip("/")
        self.model = engine.model
        self.device = device_here(engine.device)
        self._engine = engine

    def prepare(self) -> None:
        """Make its directories. Raises ServiceError when the model is not a directory with a configuration, when SGLang
        is not installed, or for adapters on a CPU."""
        engine = self._engine
        if not (Path(engine.model) / "config.json").is_file():
            raise ServiceError(f"{engine.model} is no model in Hugging Face layout: it has no config.json")
        interpreter()
        if engine.adapters and self.device == "cpu":
            raise ServiceError(
                "SGLang serves no adapters on a CPU: publish versions merged ([learner] lora), or use another kind"
            )
        self.home.mkdir(parents=True, exist_ok=True)
        if engine.key:
            options = f"api-key: {json.dumps(engine.key)}\n".encode()
            durable.write(self._options_file, options, mode=durable.PRIVATE_MODE)

    def command(self) -> list[str]:
        engine, address = self._engine, urlsplit(self.url)
        command = [interpreter(), "-P", "-m", "sglang.launch_server", "--model-path", engine.model]
        command += ["--served-model-name", engine.name, "--host", address.hostname or "127.0.0.1"]
        command += ["--port", str(address.port or 8000), "--max-running-requests", str(engine.max_num_seqs)]
        command += ["--incremental-streaming-output", "--sampling-backend", "pytorch", "--log-level-http", "warning"]
        if engine.key:
            command += ["--config", str(self._options_file)]
        if engine.max_model_len:
            command += ["--context-length", str(self._context_length())]
        command += adapter_arguments(engine.adapters)
        if self.device == "cpu":
            tokens = max(FEWEST_TOKENS, (engine.kv_cache_mb << 20) // BYTES_OF_TOKEN)
            command += ["--device", "cpu", "--dtype", "float32", "--disable-overlap-schedule"]
            # The tokens bound the cache; the fraction is what others may take meanwhile, of which a start would end.
            command += ["--max-total-tokens", str(tokens), "--mem-fraction-static", "0.5"]
            command += ["--sleep-on-idle"]  # it would take a core when idle
        return [*command, *engine.args]

    def environment(self) -> dict[str, str]:
        common = {
            "HF_HUB_OFFLINE": "1",
            "SGLANG_CACHE_DIR": str(self.home / "cache"),
            "TRITON_CACHE_DIR": str(self.home / "triton"),
        }
        if self.device == "cpu":
            common |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        return common

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def start(self, timeout_s: float = 300) -> None:
        """Start and wait until it is ready: half a minute, or minutes on a busy machine."""
        super().start(timeout_s)

    def _context_length(self) -> int:
        """For outputs of the length that is asked for, within what the model has: SGLang does not start beyond."""
        length = self._engine.max_model_len
        config = json.loads((Path(self.model) / "config.json").read_bytes())
        limit = (config.get("text_config") or config).get("max_position_embeddings") or length + RESERVE
        return min(length + RESERVE, max(limit, length))

    @property
    def _options_file(self) -> Path:
        return self.home / "options.yaml"


def adapter_arguments(room: AdapterRoom | None) -> list[str]:
    """What a server needs to serve adapters; none for None."""
    if room is None:
        return []
    arguments = ["--enable-lora", "--max-lora-rank", str(room.rank), "--lora-target-modules", "all"]
    return [*arguments, "--max-loras-per-batch", str(room.adapters), "--max-loaded-loras", str(room.adapters)]


def interpreter() -> str:
    """The Python that has SGLang. Raises ServiceError, with what to install, where there is none."""
    if PYTHON.is_file():
        return str(PYTHON)
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    raise ServiceError("SGLang is not installed: run `make setup ENGINE=sglang`; or set [engine] local = false")


def device_here(device: Device = "auto") -> Literal["cpu", "cuda"]:
    """What SGLang runs on here. Raises ServiceError where it is not installed, or where CUDA is asked for and is not
    there."""
    interpreter()
    if device == "cuda" and not usable():
        raise ServiceError("[engine] device is cuda, and CUDA finds no GPU (check nvidia-smi)")
    return "cuda" if device == "cuda" or (device == "auto" and usable()) else "cpu"
