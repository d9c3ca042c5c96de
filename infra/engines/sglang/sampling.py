"""How a scheduler of SGLang draws tokens under our plugin (`worker`): hooks around its own functions.

- Log-probabilities are the model's own, before penalties and biases; those of a grammar stay.
- A request's seed decides its tokens, whoever shares the batch; SGLang does so in a mode that costs throughput, and on
  GPUs alone.
- Penalties count each token once it is sampled, and what was sampled before a pause; a request's own stop ids end it
  also where it passes its model's.

Invariant: what is not asked for costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

SEEDS = 2**63


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
    return torch.randint(-SEEDS, SEEDS - 1, (count,), dtype=torch.int64)
