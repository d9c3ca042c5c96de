"""What SGLang lacks for training on its tokens, as a plugin of its own framework: every process of a server in whose
environment Millrace is installed calls `register`, by the entry point `sglang.srt.plugins`.

- Log-probabilities, seeds and penalties are right (`sampling`).
- A request that would end SGLang's scheduler is refused (a token id outside the vocabulary, a setting out of its
  range); an output that would pass the context ends there, where SGLang refuses the request.
- `POST /millrace/receive` takes a version from a learner's broadcast. Inside SGLang it is an update from tensors in the
  load format `millrace`, which every process of the model hears of.
- `GET /millrace` tells how the server stands without waiting for its scheduler; `POST /millrace/abort` says how many
  requests it ended.

Invariants: all bytes of a broadcast are here and their sha256 is right before any weight is touched; torch is loaded in
SGLang only, since whoever talks to SGLang reads the names below."""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from millrace.infra.engines.base import LEAST_REPETITION
from millrace.infra.engines.kind import RECEIVER

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

Change = Callable[..., tuple[bool, str]]
"""of weights: whether it was made, and what is to say"""

LOAD_FORMAT = "millrace"
STATE, ABORT, RECEIVE = "/millrace", "/millrace/abort", "/millrace/receive"
RAW = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""makes SGLang's log-probabilities those before the temperature"""
RESERVE = 2
"""tokens of the context that SGLang never fills"""
LARGEST = 2**31 - 1
"""of 32 bits, in which SGLang's tensors hold what requests set"""
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
StopId = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


class SamplingSettings(msgspec.Struct):
    """`sampling_params` of a request as far as SGLang's scheduler would end by another type or a number out of range:
    what is null has its default, and SGLang itself checks the rest."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=LARGEST)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=LEAST_REPETITION)] | None = None
    logit_bias: dict[str, Bias] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[StopId] | None = None
    ignore_eos: bool | None = None
    sampling_seed: int | None = None


def register() -> None:
    """Hook into this process of SGLang, by what it is: the server of HTTP, or a scheduler with a model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    os.environ[RAW] = "1"  # schedulers are begun after this, and inherit it
    if multiprocessing.parent_process() is None:
        _add_routes()
        tokenizer = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
        HookRegistry.register(tokenizer, validate, HookType.BEFORE)
        return
    from millrace.infra.engines.sglang import sampling

    batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(f"{batch}.apply_logits_bias", sampling.keep_raw, HookType.AROUND)
    HookRegistry.register(f"{batch}.from_schedule_batch", sampling.prepare_batch, HookType.AFTER)
    HookRegistry.register(f"{batch}.merge_batch", sampling.seed_both, HookType.BEFORE)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", sampling.sample, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", sampling.draw, HookType.AROUND)
    request = "sglang.srt.managers.schedule_batch.Req"
    HookRegistry.register(f"{request}._check_token_based_finish", sampling.ends, HookType.AROUND)
    HookRegistry.register(f"{updater}.update_weights_from_tensor", receive, HookType.AROUND)
    HookRegistry.register(f"{updater}.update_weights_from_disk", load, HookType.AROUND)


# ---------------------------------------------------------------------- the server of HTTP


def _add_routes() -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import (
        BeginWeightUpdateReqInput,
        EndWeightUpdateReqInput,
        UpdateWeightsFromTensorReqInput,
    )
    from sglang.srt.runtime_context import get_lora, get_parallel
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.version import __version__

    start = f"{time.time():.6f}"

    def manager() -> TokenizerManager:
        return http_server.get_global_state().tokenizer_manager

    async def state() -> dict[str, object]:
        tokenizer = manager()
        return {
            "sglang": __version__,
            "incarnation": start,
            "label": tokenizer.config_value("weight_version"),
            "is_paused": tokenizer.is_pause,
            "model_type": getattr(tokenizer.model_config.hf_config, "model_type", ""),
            "ranks": get_parallel().tp_size,
            "replicas": get_parallel().dp_size,
            "adapters": [one.lora_name for one in tokenizer.lora_registry.get_all_adapters().values()]
            if get_lora().enable_lora
            else None,
        }

    async def abort(request_ids: list[str]) -> dict[str, int]:
        tokenizer = manager()
        names = [rid for rid in tokenizer.rid_to_state if not request_ids or rid.rpartition("/")[0] in request_ids]
        for name in names:
            tokenizer.abort_request(name)
        return {"count": len(names)}

    async def receive_broadcast(group: dict[str, object], notice: dict[str, object]) -> dict[str, object]:
        """One call does what SGLang has three for: whoever dies before its answer leaves no update open."""
        tokenizer, broadcast = manager(), {"group": group, "notice": notice}
        payload = MultiprocessingSerializer.serialize(broadcast)
        await tokenizer.end_weight_update(EndWeightUpdateReqInput())  # one that somebody left open
        success, message = await tokenizer.begin_weight_update(BeginWeightUpdateReqInput(selector="target"))
        if success:
            update = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[payload] * get_parallel().tp_size,
                load_format=LOAD_FORMAT,
                flush_cache=False,
                selector="target",
            )
            success, message = await tokenizer.update_weights_from_tensor(update)
            await tokenizer.end_weight_update(EndWeightUpdateReqInput())
        return {"success": success, "message": message}

    http_server.app.add_api_route(STATE, state, methods=["GET"])
    http_server.app.add_api_route(ABORT, abort, methods=["POST"])
    http_server.app.add_api_route(RECEIVE, receive_broadcast, methods=["POST"])


def validate(manager: TokenizerManager, request: GenerateReqInput, input_ids: Sequence[int] | None) -> None:
    """Refuse what the scheduler would end by; let an output end where the context does. Raises ValueError."""
    from sglang.srt.runtime_context import get_exec

    vocabulary = manager.model_config.vocab_size
    if input_ids is not None and not (input_ids and 0 <= min(input_ids) <= max(input_ids) < vocabulary):
        raise ValueError(f"a prompt must have token ids, of 0 to {vocabulary - 1}")
    if not 0 <= (getattr(request, "top_logprobs_num", 0) or 0) <= vocabulary:
        raise ValueError(f"top_logprobs_num must be 0 to {vocabulary}")
    params = getattr(request, "sampling_params", None)
    if not isinstance(params, dict):
        return
    try:
        settings = msgspec.convert(params, SamplingSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling_params: {error}") from error
    if settings.min_new_tokens and max(settings.stop_token_ids or (0,)) >= vocabulary:
        raise ValueError(f"with min_new_tokens, stop_token_ids must be token ids, of 0 to {vocabulary - 1}")
    if settings.sampling_seed is not None and get_exec().kernel.sampling_backend != "pytorch":
        raise ValueError("this server takes no seeds: start SGLang with --sampling-backend pytorch")
    repetition = settings.repetition_penalty not in (1, None)
    if (settings.presence_penalty or settings.frequency_penalty or repetition) and not manager.config_value(
        "disable_overlap_schedule"
    ):
        raise ValueError("this server counts penalties a token late: start SGLang with --disable-overlap-schedule")
    room = manager.context_len - RESERVE - len(input_ids or ())
    if settings.max_new_tokens is not None and room > 0:
        params["max_new_tokens"] = min(settings.max_new_tokens, room)


# ---------------------------------------------------------------------- weights


def receive(
    original: Change, updater: WeightUpdater, named_tensors: Mapping[str, object], load_format: str | None = None
) -> tuple[bool, str]:
    """Around an update from tensors: in our format it is the announcement of a broadcast. Nothing is raised, since a
    scheduler ends with what it does not catch."""
    if load_format != LOAD_FORMAT:
        return original(updater, named_tensors=named_tensors, load_format=load_format)
    try:
        group, notice = named_tensors["group"], named_tensors["notice"]
        tensors = pkgutil.resolve_name(RECEIVER)(group, notice, updater.tp_rank + 1)
    except Exception as error:
        return False, f"the weights did not come: {error}"
    try:
        updater.get_model().load_weights(list(tensors.items()))
    except Exception as error:
        return False, f"the weights that came could not be loaded, and are half there: {error}"
    return True, "Success"


def load(original: Change, *args: object, **options: object) -> tuple[bool, str]:
    """Around an update from a directory: SGLang's scheduler ends with files that are cut short, since it reads them
    again to take back what it read."""
    try:
        return original(*args, **options)
    except Exception as error:
        return False, f"the weights could not be loaded, and are half there: {error}"
