"""What SGLang lacks for training on its tokens, as a plugin of its own framework: every process of a server in whose
environment Millrace is installed calls `register`, by the entry point `sglang.srt.plugins`.

- Log-probabilities are the model's own: SGLang's come after penalties and biases.
- A request's seed decides its tokens, whoever shares the batch; SGLang does so in a mode that costs throughput, and on
  GPUs alone.
- Penalties count each token once it is sampled, and what was sampled before a pause; a request's own stop ids end it
  also where it passes its model's.
- A token id outside the vocabulary is refused, where SGLang's scheduler dies of it; an output that would pass the
  context ends there, where SGLang refuses the request.
- A version is received from a learner's broadcast (`update_weights_from_tensor` with the load format `millrace`).
- `GET /millrace` tells how the server stands without waiting for its scheduler; `POST /millrace/abort` says how many
  requests it ended.

Invariants: what is not asked for costs nothing; all bytes of a broadcast are here and their sha256 is right before any
weight is touched; torch is loaded by what samples only, since whoever talks to SGLang reads the names below."""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from millrace.infra.engines.kind import RECEIVER

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

Change = Callable[..., tuple[bool, str]]
"""of weights: whether it was made, and what is to say"""

LOAD_FORMAT = "millrace"
STATE, ABORT = "/millrace", "/millrace/abort"
RAW = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""makes SGLang's log-probabilities those before the temperature"""
RESERVE = 2
"""tokens of the context that SGLang never fills"""
SEEDS = 2**63


def register() -> None:
    """Hook into this process of SGLang, by what it is: the server of HTTP, or a scheduler with a model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    os.environ[RAW] = "1"  # schedulers are begun after this, and inherit it
    if multiprocessing.parent_process() is None:
        _add_routes()
        tokenizer = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
        HookRegistry.register(tokenizer, validate, HookType.BEFORE)
        return
    batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(f"{batch}.apply_logits_bias", keep_raw, HookType.AROUND)
    HookRegistry.register(f"{batch}.from_schedule_batch", prepare_batch, HookType.AFTER)
    HookRegistry.register(f"{batch}.merge_batch", seed_both, HookType.BEFORE)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", sample, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", draw, HookType.AROUND)
    request = "sglang.srt.managers.schedule_batch.Req"
    HookRegistry.register(f"{request}._check_token_based_finish", ends, HookType.AROUND)
    HookRegistry.register(f"{updater}.update_weights_from_tensor", receive, HookType.AROUND)
    HookRegistry.register(f"{updater}.update_weights_from_disk", load, HookType.AROUND)


# ---------------------------------------------------------------------- the server of HTTP


def _add_routes() -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.runtime_context import get_lora, get_parallel
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

    http_server.app.add_api_route(STATE, state, methods=["GET"])
    http_server.app.add_api_route(ABORT, abort, methods=["POST"])


def validate(manager: TokenizerManager, request: GenerateReqInput, input_ids: Sequence[int] | None) -> None:
    """Refuse a prompt that is none of the model's tokens; let an output end where the context does. Raises
    ValueError."""
    from sglang.srt.runtime_context import get_exec

    vocabulary = manager.model_config.vocab_size
    if input_ids is not None and not (input_ids and 0 <= min(input_ids) <= max(input_ids) < vocabulary):
        raise ValueError(f"a prompt must have token ids, of 0 to {vocabulary - 1}")
    params = getattr(request, "sampling_params", None)
    if not isinstance(params, dict):
        return
    if params.get("sampling_seed") is not None and get_exec().kernel.sampling_backend != "pytorch":
        raise ValueError("this server takes no seeds: start SGLang with --sampling-backend pytorch")
    penalties = [params.get(f"{name}_penalty") for name in ("presence", "frequency")] + [_repetition(params)]
    if any(penalties) and not manager.config_value("disable_overlap_schedule"):
        raise ValueError("this server counts penalties a token late: start SGLang with --disable-overlap-schedule")
    room = manager.context_len - RESERVE - len(input_ids or ())
    if params.get("max_new_tokens") is not None and room > 0:
        params["max_new_tokens"] = min(params["max_new_tokens"], room)


def _repetition(params: Mapping[str, object]) -> bool:
    return params.get("repetition_penalty", 1) not in (1, None)


# ---------------------------------------------------------------------- sampling


def keep_raw(original: Callable[..., None], batch: SamplingBatchInfo, logits: torch.Tensor) -> None:
    """Around what adds penalties, biases and grammars to logits [batch, vocabulary]: those with the grammars alone stay
    in the batch for `sample`."""
    penalties = batch.penalizer_orchestrator
    is_biased = (
        batch.logit_bias is not None
        or batch.acc_additive_penalties is not None
        or batch.acc_scaling_penalties is not None
        or (penalties is not None and penalties.is_required)
    )
    batch.raw_logits = None
    if is_biased:
        batch.raw_logits = logits.clone()
        if batch.grammar_mask is not None:
            batch.grammar_mask.apply(batch.raw_logits)
    original(batch, logits)


def sample(
    original: Callable[..., torch.Tensor],
    sampler: Sampler,
    output: LogitsProcessorOutput,
    batch: SamplingBatchInfo,
    *args: object,
    **options: object,
) -> torch.Tensor:
    """Around the sampler: its log-probabilities come from what `keep_raw` kept."""
    raw, batch.raw_logits = getattr(batch, "raw_logits", None), None
    if raw is not None and options.get("logprob_logits") is None:
        options["logprob_logits"] = raw
    return original(sampler, output, batch, *args, **options)


def prepare_batch(batch: SamplingBatchInfo, _: type, schedule: ScheduleBatch, *__: object) -> None:
    """After a batch was made of requests: where one brings a seed, each has one; penalties know what a request sampled
    before it was retracted, and repetitions count its prompt, which SGLang leaves out."""
    import torch

    requests = schedule.reqs
    seeds = [request.sampling_params.sampling_seed for request in requests]
    if batch.sampling_seed is None and any(seed is not None for seed in seeds):
        fresh = _fresh_seeds(len(seeds)).tolist()
        values = [other if seed is None else seed for seed, other in zip(seeds, fresh, strict=True)]
        batch.sampling_seed = torch.tensor(values, dtype=torch.int64).to(batch.device)
    if not batch.penalizer_orchestrator.is_required:
        return
    for penalizer in batch.penalizer_orchestrator.penalizers.values():
        for name in ("repetition", "presence", "frequency"):
            sums = getattr(penalizer, f"cumulated_{name}_penalties", None)
            if sums is None:
                continue
            penalties = getattr(penalizer, f"{name}_penalties")
            for row, request in enumerate(requests):
                history = [*request.output_ids]
                if name == "repetition":
                    history += request.origin_input_ids
                counts = torch.bincount(torch.tensor(history, dtype=torch.int64), minlength=sums.shape[1])
                counts = counts.to(sums.device)
                if name == "frequency":
                    sums[row] += counts * penalties[row]
                else:
                    sums[row] = torch.where(counts > 0, penalties[row], sums[row])


def ends(original: Callable[..., bool], request: Req, token_ids: Sequence[int]) -> bool:
    """Around what ends a request by its tokens: one that passes its model's end tokens still ends at its own."""
    params = request.sampling_params
    if not params.ignore_eos or not params.stop_token_ids:
        return original(request, token_ids)
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    for place, token in enumerate(token_ids):
        if token in params.stop_token_ids:
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(token_ids) + place + 1
            return True
    return False


def seed_both(first: SamplingBatchInfo, second: SamplingBatchInfo) -> None:
    """Before a batch takes in another: both have seeds, or none."""
    if (first.sampling_seed is None) != (second.sampling_seed is None):
        for batch in (first, second):
            if batch.sampling_seed is None:
                batch.sampling_seed = _fresh_seeds(len(batch)).to(batch.device)


def draw(
    original: Callable[..., torch.Tensor], logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token for each row of logprobs [rows, vocabulary] by its seed and position, int64 [rows, 1]: the largest sum
    with Gumbel noise. SGLang's own noise needs a GPU."""
    import torch

    if logprobs.is_cuda:
        return original(logprobs, seed, positions)
    noise = torch.empty(logprobs.shape, dtype=torch.float64)
    generator = torch.Generator()
    for row, (number, position) in enumerate(zip(seed.tolist(), positions.tolist(), strict=True)):
        generator.manual_seed(hash((number, position)) % SEEDS)
        noise[row].exponential_(generator=generator)
    return (logprobs.double() - noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_()).argmax(1, keepdim=True)


def _fresh_seeds(count: int) -> torch.Tensor:
    """int64 [count]"""
    import torch

    return torch.randint(-SEEDS, SEEDS - 1, (count,), dtype=torch.int64)


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
