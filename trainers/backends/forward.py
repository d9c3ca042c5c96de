"""The forward pass of a packed micro-batch.

logp_t = log softmax(logits_{t-1} / temperature)[token_t]          in fp32, for trainable tokens alone
H_t    = - sum_v p_v log p_v                                       of the same distribution, without gradient
v_t    = the value head after token t                              of value models, for every token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trainers.batches.packing import Packed
from trainers.errors import BadConfiguration


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The `Run` of a model and a micro-batch. `extra`: more arguments of the models' forward."""

    model: torch.nn.Module
    batch: Packed
    teacher_model: torch.nn.Module | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities float32[M] of the labels, with gradient where enabled, and entropies float32[M]."""
        return token_logprobs(self.model, self.batch, temperature, **self.extra)

    def distribution(self, temperature: float) -> torch.Tensor:
        """Log-probabilities float32[M, V]."""
        return token_distribution(self.model, self.batch, temperature, **self.extra)

    def teacher(self, temperature: float) -> torch.Tensor:
        """The teacher's float32[M, V], without gradient."""
        if self.teacher_model is None:
            raise BadConfiguration("no teacher; hold one beside the policy first")
        with torch.no_grad():
            return token_distribution(self.teacher_model, self.batch, temperature, **self.extra)

    def hidden(self) -> torch.Tensor:
        """What a pipeline stage before the last passes on, [1, T, H]."""
        return _run(self.model, self.batch, **self.extra)

    def values(self) -> torch.Tensor:
        """float32[T]."""
        values: torch.Tensor = _run(self.model, self.batch, **self.extra)[0, :, 0].float()
        return values


def token_logprobs(
    model: torch.nn.Module, batch: Packed, temperature: float, **extra: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities float32[M] of the labels, with gradient where enabled, and entropies float32[M]."""
    distribution = token_distribution(model, batch, temperature, **extra)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, batch.labels[:, None])[:, 0], entropy


def token_distribution(model: torch.nn.Module, batch: Packed, temperature: float, **extra: Any) -> torch.Tensor:
    """Log-probabilities float32[M, V] of what may follow at each label's position."""
    logits = _run(model, batch, logits_to_keep=batch.at, **extra)[0]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def _run(model: torch.nn.Module, batch: Packed, **more: Any) -> torch.Tensor:
    if "inputs_embeds" not in more:
        more["input_ids"] = batch.tokens
    logits: torch.Tensor = model(
        position_ids=batch.positions,
        attention_mask=batch.tokens.new_zeros((1, 1, 1, 1)),  # 4-D: transformers builds no mask of its own
        use_cache=False,
        runs=batch.runs,
        **more,
    ).logits
    return logits
