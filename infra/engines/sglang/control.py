"""SGLang's reinforcement-learning routes, and those of our plugin, as an `EngineControl`.

Traps that this file knows: SGLang answers success to a checkpoint that lacks tensors of its model, and samples from a
mixture; a pause `in_place` goes on with keys of the old weights; an update that resets the cache itself answers 400
though it changed the weights.

Invariants: nothing is said to be loaded before it has been proven. For each start of an engine its first version is
loaded twice, the second time over noise: that SGLang's hashes of both agree says that the checkpoint determines every
weight. A later version of the same tensors takes the same way; one of others is proven anew. What was loaded once has
the same hashes whenever it is loaded, however it comes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from millrace.infra import faults
from millrace.infra.engines.control import Broadcast, EngineLoad, EngineState, HttpControl, PauseMode
from millrace.infra.engines.sglang.wire import ServerNotice, read_notice
from millrace.infra.engines.sglang.worker import ABORT, RECEIVE, STATE
from millrace.infra.errors import EngineError, EngineRejected
from millrace.schemas.labels import is_base, newest_label

LARGEST_HEADER = 64 << 20
MODES = {"keep": "retract", "wait": "retract", "abort": "abort"}
"""SGLang's pauses; one that waits is made of a wait before it"""

Tensors = frozenset[tuple[str, str, tuple[int, ...]]]
"""names, dtypes and shapes"""


class HeaderSlot(msgspec.Struct):
    """What a safetensors header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]


_header = msgspec.json.Decoder(dict[str, object])


@dataclass(slots=True)
class StartProof:
    """What is known of one start of an engine. tensors: of the versions that determine all its weights; hashes: of its
    weights, by the sha256 of the files that they came from."""

    incarnation: str
    tensors: Tensors | None = None
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)


class SglangControl(HttpControl):
    """Controls SGLang's server. `why_no_adapters`: why it serves none, where that is known."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._proof = StartProof("")

    async def state(self) -> EngineState:
        notice = await self._notice()
        served = (newest_label(notice.adapters or ()) if is_base(notice.label) else None) or notice.label
        base = notice.label if is_base(notice.label) else ""
        return EngineState(notice.incarnation, served, notice.is_paused, base)

    async def occupancy(self) -> EngineLoad | None:
        try:
            loads = (await self._call("GET", "/v1/loads?include=core")).json()["loads"]
        except (EngineRejected, KeyError, TypeError, ValueError):
            return None  # an older one does not say

        def numbers(name: str) -> list[float]:
            return [float(load.get(name, 0)) for load in loads]

        usage = numbers("token_usage")
        return EngineLoad(
            int(sum(numbers("num_running_reqs"))),
            int(sum(numbers("num_waiting_reqs"))),
            1 - sum(usage) / len(usage) if usage else None,
            sum(numbers("gen_throughput")),
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "wait":
            # What changes weights waits for the requests under way, also where there is no update to end.
            await self._end_update(self._load_timeout_s)
        await self._post("/pause_generation", {"mode": MODES[mode]}, self._load_timeout_s)

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def refusal(self, folder: Path) -> str | None:
        try:
            model_type = json.loads((folder / "config.json").read_bytes()).get("model_type")
        except (OSError, ValueError, AttributeError):
            return None  # the load itself says what is wrong
        served = (await self._notice()).model_type
        if model_type == served:
            return None
        return f"{folder} is of the type {model_type}, and {self.url} serves {served}: SGLang would mix the two"

    async def load(self, folder: Path) -> None:
        proof = await self._proof_of_start()
        tensors, digest = file_tensors(folder), _digest(folder)
        await self._load_folder(folder)
        hashes = await self._hashes()
        if tensors is None or tensors != proof.tensors:
            await self._post("/weights_checker", {"action": "reset_tensors"}, self._load_timeout_s)
            await self._load_folder(folder)
            wrong = sorted(name for name, value in (await self._hashes()).items() if value != hashes.get(name))
            if wrong:
                raise EngineError(
                    f"{self.url} says that it loaded {folder}, which does not determine {', '.join(wrong[:3])}"
                    f"{' and others' if len(wrong) > 3 else ''}: the engine serves another architecture"
                )
            proof.tensors = tensors
        self._compare(proof, digest, hashes)

    async def adapters(self) -> tuple[str, ...]:
        return tuple((await self._notice()).adapters or ())

    async def load_adapter(self, name: str, folder: Path) -> None:
        served = (await self._notice()).adapters
        if served is None:
            raise EngineRejected(f"{self.url} takes no adapters: start SGLang with --enable-lora, on a GPU", 400)
        if name not in served:
            await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, self._load_timeout_s)

    async def unload_adapter(self, name: str) -> None:
        if name in await self.adapters():
            await self._post("/unload_lora_adapter", {"lora_name": name}, self._load_timeout_s)

    async def ranks(self) -> int:
        notice = await self._notice()
        if notice.replicas > 1:
            raise EngineRejected(f"{self.url} has {notice.replicas} replicas of its model, of which none receives", 400)
        if (await self._proof_of_start()).tensors is None:
            raise EngineRejected(f"{self.url} has to load one version from a directory before it receives any", 400)
        return notice.ranks

    async def receive(self, offer: Broadcast) -> None:
        proof = await self._proof_of_start()
        tensors = _slots(offer.header[8:])
        if tensors is None or tensors != proof.tensors:
            raise EngineRejected(f"{self.url} serves other tensors than those that are offered", 400)
        # One call does what vLLM has three for: whoever dies before it leaves nothing behind.
        faults.point("transfer.after_group")
        faults.point("transfer.after_start")
        await self._change(RECEIVE, {"group": offer.group, "notice": offer.notice})
        faults.point("transfer.after_update")
        self._compare(proof, offer.digest, await self._hashes())

    async def set_version(self, label: str) -> None:
        await self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def reset_prefix_cache(self) -> bool:
        try:
            await self._call("POST", "/flush_cache")
        except EngineRejected:
            return False  # requests are under way
        return True

    async def abort(self, request_ids: Sequence[str] = ()) -> int:
        return int((await self._post(ABORT, list(request_ids)))["count"])

    # ------------------------------------------------------------------ weights

    async def _load_folder(self, folder: Path) -> None:
        await self._change("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": False})

    async def _change(self, path: str, body: dict[str, object]) -> None:
        """A change of weights. Raises EngineError where it failed."""
        try:
            await self._post(path, body, self._load_timeout_s)
        except EngineRejected as error:
            raise EngineError(str(error)) from error

    async def _end_update(self, timeout_s: float | None = None) -> None:
        try:
            await self._post("/end_weight_update", {}, timeout_s)
        except EngineRejected:
            return  # none was open

    async def _hashes(self) -> dict[str, str]:
        """Of every weight, by its rank and name."""
        answer = await self._post("/weights_checker", {"action": "checksum"}, self._load_timeout_s)
        return {
            f"{rank}:{name}": str(value)
            for rank, one in enumerate(answer.get("ranks", ()))
            for name, value in one["checksums"].items()
        }

    async def _proof_of_start(self) -> StartProof:
        """Empty for a start that is another than before."""
        incarnation = (await self._notice()).incarnation
        if self._proof.incarnation != incarnation:
            self._proof = StartProof(incarnation)
        return self._proof

    def _compare(self, proof: StartProof, digest: str | None, hashes: dict[str, str]) -> None:
        """Raises EngineError where weights of the same files had other hashes before."""
        former = proof.hashes.get(digest or "", hashes)
        wrong = sorted(name for name in hashes.keys() | former.keys() if hashes.get(name) != former.get(name))
        if wrong:
            raise EngineError(f"{self.url} loaded the same files as before, and {wrong[0]} differs: restart it")
        if digest is not None:
            proof.hashes = {digest: hashes, **{key: proof.hashes[key] for key in [*proof.hashes][:1]}}

    # ------------------------------------------------------------------ calls

    async def _notice(self) -> ServerNotice:
        try:
            answer = await self._call("GET", STATE)
        except EngineRejected as error:
            return read_notice(error.status, b"", self.url)
        return read_notice(answer.status_code, answer.content, self.url)

    async def _post(self, path: str, body: object, timeout_s: float | None = None) -> dict[str, Any]:
        """The object that it answers. Raises EngineError also for a success that says that it was none."""
        timeout = self._client.timeout if timeout_s is None else timeout_s
        answer = (await self._call("POST", path, json=body, timeout=timeout)).json()
        if not isinstance(answer, dict) or answer.get("success") is False:
            raise EngineError(f"{self.url}{path} answered {str(answer)[:300]}")
        return answer


def file_tensors(folder: Path) -> Tensors | None:
    """What the safetensors files of a directory hold, None where there is none that can be read."""
    tensors: Tensors = frozenset()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                slots = _slots(file.read(length) if length <= LARGEST_HEADER else b"")
        except OSError:
            return None
        if slots is None:
            return None
        tensors |= slots
    return tensors or None


def _slots(header: bytes) -> Tensors | None:
    """The tensors of a safetensors header; None for one that cannot be read."""
    try:
        slots = _header.decode(header)
        slots.pop("__metadata__", None)
        named = msgspec.convert(slots, dict[str, HeaderSlot])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return frozenset((name, slot.dtype, slot.shape) for name, slot in named.items())


def _digest(folder: Path) -> str | None:
    """The sha256 hex of the one weight file, as the directory's manifest has it."""
    try:
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
        return str(files["model.safetensors"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
