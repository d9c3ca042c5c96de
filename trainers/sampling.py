"""Samples replies from a model in this process, with a key-value cache: for tests, warm starts and evaluation, not for
serving.

Invariant: log-probabilities are of the distribution that was sampled from (temperature applied), so they are the
behaviour policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True, slots=True)
class SampledReply:
    """prompt: index into the prompts; tokens: the reply, its end token included when it `finished`; logprobs: one a
    token."""

    prompt: int
    tokens: list[int]
    logprobs: list[float]
    finished: bool


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    n: int = 1,
    max_tokens: int,
    end: int,
    generator: torch.Generator | None,
    temperature: float = 1.0,
) -> list[SampledReply]:
    """n replies to each prompt, in prompt order. Without a generator it is greedy (the log-probabilities are then those
    of temperature)."""
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    training = model.training
    model.train(False)
    try:
        replies = [
            reply
            for indices in by_length.values()
            for reply in _bucket(model, prompts, indices, n, max_tokens, end, generator, temperature)
        ]
    finally:
        model.train(training)
    return sorted(replies, key=lambda reply: reply.prompt)


def _bucket(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    n: int,
    max_tokens: int,
    end: int,
    generator: torch.Generator | None,
    temperature: float,
) -> list[SampledReply]:
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prompts[i] for i in indices], device=model.device)
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    cache.batch_repeat_interleave(n)
    logits = logits.repeat_interleave(n, 0)
    tokens, logprobs = [], []
    has_ended = torch.zeros(len(logits), dtype=torch.bool, device=model.device)
    for index in range(max_tokens):
        distribution = torch.log_softmax(logits.float() / temperature, -1)
        if generator is None:
            next_tokens = distribution.argmax(-1, keepdim=True)
        else:
            next_tokens = torch.multinomial(distribution.exp(), 1, generator=generator)
        tokens.append(next_tokens[:, 0])
        logprobs.append(distribution.gather(-1, next_tokens)[:, 0])
        has_ended |= next_tokens[:, 0] == end
        if index + 1 == max_tokens or bool(has_ended.all()):
            break
        logits = model(input_ids=next_tokens, past_key_values=cache, use_cache=True).logits[:, -1]
    replies = []
    for row, (ids_of, logprobs_of) in enumerate(
        zip(torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
    ):
        length = ids_of.index(end) + 1 if end in ids_of else len(ids_of)
        replies.append(SampledReply(indices[row // n], ids_of[:length], logprobs_of[:length], end in ids_of))
    return replies
