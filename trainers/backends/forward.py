"""The forward pass of a packed micro-batch.

logp_t = log softmax(logits_{t-1} / temperature)[token_t]          in fp32, for trainable tokens alone
H_t    = - sum_v p_v log p_v                                       of the same distribution, without gradient
"""

from __future__ import annotations

import torch

from trainers.batches.packing import Packed


def token_logprobs(model: torch.nn.Module, batch: Packed, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities float32[M] of the labels, with gradient where enabled, and entropies float32[M]."""
    logits = model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=batch.tokens.new_zeros((1, 1, 1, 1)),  # 4-D: transformers builds no mask of its own
        use_cache=False,
        logits_to_keep=batch.at,
        runs=batch.runs,
    ).logits[0]
    distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, batch.labels[:, None])[:, 0], entropy
