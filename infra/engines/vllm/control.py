"""vLLM's reinforcement-learning routes as an `EngineControl` (start it with `VLLM_SERVER_DEV_MODE=1`).

Traps that this file knows: `/reset_prefix_cache` answers 200 when it did nothing, its body tells; a failed load
answers 500 while `/health` stays 200; the build for CPUs reloads some models wrongly (`wrong_on_cpu`). An engine's
incarnation is the start time of its process, from `/metrics`: a restarted engine also forgets its label, so the metrics
are read only when the label is not the one that was seen with the incarnation before, or a call has failed since."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from millrace.infra import faults
from millrace.infra.engines.bearer import Key
from millrace.infra.engines.control import Broadcast, EngineLoad, EngineState, HttpControl, PauseMode, TokenRate
from millrace.infra.errors import EngineError, EngineRejected, EngineTimeout, EngineUnavailable
from millrace.schemas.labels import is_base, newest_label, parse_label

START_TIME = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? (\S+)", re.MULTILINE)
GAUGE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total)"
    r"(?:\{[^}]*\})? (\S+)",
    re.MULTILINE,
)
"""a line of the metrics, of which there is one for each of its engine cores"""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""in config.json: how many there are, as model families call it"""


class VllmControl(HttpControl):
    """Controls vLLM's server. on_cpu: whether it runs on a CPU, where that is known; None: it is asked."""

    def __init__(
        self,
        url: str,
        *,
        key: Key = "",
        timeout_s: float = 30.0,
        load_timeout_s: float = 600.0,
        on_cpu: bool | None = None,
    ) -> None:
        super().__init__(url, key=key, timeout_s=timeout_s, load_timeout_s=load_timeout_s)
        self._identity: tuple[str, str] | None = None  # (incarnation, label seen or set with it)
        self._on_cpu = on_cpu
        self._rate = TokenRate()

    async def state(self) -> EngineState:
        label = str((await self._get("/weight_info"))["weight_version"])
        is_paused = bool((await self._get("/is_paused"))["is_paused"])
        if self._identity is None or self._identity[1] != label:
            self._identity = (await self._incarnation(), label)
        if not is_base(label):
            return EngineState(self._identity[0], label, is_paused)
        return EngineState(self._identity[0], newest_label(await self.adapters()) or label, is_paused, label)

    async def occupancy(self) -> EngineLoad | None:
        numbers: defaultdict[str, list[float]] = defaultdict(list)
        for name, number in GAUGE.findall((await self._call("GET", "/metrics")).text):
            numbers[name].append(float(number))
        running, waiting = numbers["num_requests_running"], numbers["num_requests_waiting"]
        if not running:
            return None
        usage, tokens = numbers["kv_cache_usage_perc"], numbers["generation_tokens_total"]
        return EngineLoad(
            int(sum(running)),
            int(sum(waiting)),
            1 - sum(usage) / len(usage) if usage else None,
            self._rate.since_last(sum(tokens)) if tokens else None,
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._post("/pause", params={"mode": mode})

    async def resume(self) -> None:
        await self._post("/resume")

    async def refusal(self, folder: Path) -> str | None:
        try:
            config = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError):
            return None  # the load itself says what is wrong
        reason = wrong_on_cpu(config)
        if reason is None or await self._runs_on_cpu() is False:
            return None
        unknown = "" if self._on_cpu else f"{self.url} does not say what it runs on, and "
        return f"{unknown}{folder} {reason}"

    async def load(self, folder: Path) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._post("/collective_rpc", json=call, timeout=self._load_timeout_s)

    async def adapters(self) -> tuple[str, ...]:
        models = (await self._get("/v1/models"))["data"]
        return tuple(str(one["id"]) for one in models if parse_label(str(one["id"])) and one.get("parent"))

    async def load_adapter(self, name: str, folder: Path) -> None:
        if name in await self.adapters():
            return
        try:
            call = {"lora_name": name, "lora_path": str(folder)}
            await self._call("POST", "/v1/load_lora_adapter", json=call, timeout=self._load_timeout_s)
        except EngineRejected as error:
            if "Not Found" not in str(error):
                raise
            raise EngineRejected(
                f"{self.url} takes no adapters: start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
                error.status,
            ) from error

    async def unload_adapter(self, name: str) -> None:
        if name in await self.adapters():
            await self._call("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    async def ranks(self) -> int:
        return int((await self._get("/get_world_size"))["world_size"])

    async def receive(self, offer: Broadcast) -> None:
        await self._post("/init_weight_transfer_engine", json={"init_info": offer.group})
        faults.point("transfer.after_group")
        try:
            await self._post("/start_weight_update")
        except EngineError:
            # a reloader that was killed in the middle left an update open
            await self._post("/finish_weight_update")
            await self._post("/start_weight_update")
        faults.point("transfer.after_start")
        await self._post("/update_weights", json={"update_info": offer.notice}, timeout=self._load_timeout_s)
        faults.point("transfer.after_update")
        await self._post("/finish_weight_update")

    async def set_version(self, label: str) -> None:
        await self._post("/update_weight_version", json={"new_version": label})
        # What restarted under our hands forgets this label, and is then noticed by it.
        if self._identity is not None:
            self._identity = (self._identity[0], label)

    async def reset_prefix_cache(self) -> bool:
        answer = await self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        return answer.get("success") is True

    async def abort(self, request_ids: Sequence[str] = ()) -> int:
        body = {"request_ids": [f"generate-tokens-{one}" for one in request_ids]} if request_ids else {}
        return int((await self._post("/abort_requests", json=body))["aborted"])

    async def _incarnation(self) -> str:
        start = START_TIME.search((await self._call("GET", "/metrics")).text)
        if start is None:
            raise EngineError(f"{self.url}/metrics has no process_start_time_seconds: restarts could not be noticed")
        return f"{float(start[1]):.6f}"

    async def _runs_on_cpu(self) -> bool | None:
        """None where the engine cannot say: vLLM's route for it calls pip or uv, which may be missing there."""
        if self._on_cpu is None:
            try:
                self._on_cpu = "device_config=cpu" in str((await self._get("/server_info"))["vllm_config"])
            except EngineRejected:
                self._on_cpu = False  # no vLLM: it has no such route
            except (EngineTimeout, EngineUnavailable):
                raise
            except EngineError:
                return None
        return self._on_cpu

    async def _get(self, path: str) -> dict[str, Any]:
        return _object(await self._call("GET", path))

    async def _post(self, path: str, **arguments: Any) -> dict[str, Any]:
        return _object(await self._call("POST", path, **arguments))

    def _broke(self) -> None:
        self._identity = None


def wrong_on_cpu(config: Mapping[str, object]) -> str | None:
    """What a model of this config.json does that vLLM on a CPU reloads wrongly, in silence; None where it does not."""
    if config.get("tie_word_embeddings"):
        return (
            "ties its embeddings, and vLLM on a CPU keeps the old output matrix of such a model when it reloads: "
            "`millrace policy create --untie` gives it one of its own (tie_word_embeddings=false)"
        )
    if any(config.get(name) for name in EXPERTS):
        return (
            "is a mixture of experts, which vLLM on a CPU repacks when it starts and not when it reloads: serve it by "
            'vLLM on a GPU, or set [engine] kind = "inprocess"'
        )
    return None


def _object(answer: httpx.Response) -> dict[str, Any]:
    value = answer.json()
    if not isinstance(value, dict):
        raise EngineError(f"{answer.url} answered {answer.text[:200]}, not an object")
    return value
