"""Log-probabilities of labels and entropies from logits that exist once, in the format that the head made them in.

    x_v = logit_v / temperature      z = log sum_v exp x_v
    logp = x_label - z               H = sum_v exp(x_v - z) (z - x_v)
    d logp / d logit_v = ([v = label] - exp(x_v - z)) / temperature

Forward keeps the logits and z; backward writes the gradient over the logits. `log_softmax` would keep a second copy of
them in fp32 and read each of the two several times. A GPU computes each formula in one kernel where layers are
fused too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol, TypeVar

import torch

Outcome = TypeVar("Outcome")

PIECE = 2**24
"""Logits in fp32 that exist at once where nothing is compiled."""


class _Kept(Protocol):
    """What forward leaves for backward."""

    saved_tensors: tuple[torch.Tensor, ...]
    temperature: float
    fusion: bool

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept, logits: torch.Tensor, labels: torch.Tensor, temperature: float, fusion: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, z = _by_pieces(_measure, fusion, logits, labels, temperature)
        ctx.save_for_backward(logits, labels, z)
        ctx.temperature, ctx.fusion = temperature, fusion
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: _Kept, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, labels, z = ctx.saved_tensors
        rows = max(1, len(logits) if ctx.fusion else PIECE // logits.shape[1])
        gradient_of = _compiled(_gradient) if ctx.fusion else _gradient
        for start in range(0, len(logits), rows):
            piece = slice(start, start + rows)
            gradient = gradient_of(logits[piece], labels[piece], z[piece], gradients[0][piece], ctx.temperature)
            logits[piece].copy_(gradient)  # nobody reads the logits again: the head's backward needs its input alone
        return logits, None, None, None


_apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _LabelLogprobs.apply


def label_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, *, fusion: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and labels int64[n] -> log-probabilities float32[n] and, without gradient, entropies float32[n].
    After backward the logits hold their own gradient. fusion: compile the formulas, which only a GPU is worth."""
    return _apply(logits, labels, temperature, fusion)


def _measure(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = logits.float() / temperature
    z = torch.logsumexp(x, dim=-1)
    logs = x - z[:, None]
    return logs.gather(-1, labels[:, None])[:, 0], -(torch.exp(logs) * logs).sum(-1), z


def _gradient(
    logits: torch.Tensor, labels: torch.Tensor, z: torch.Tensor, pull: torch.Tensor, temperature: float
) -> torch.Tensor:
    shares = torch.exp(logits.float() / temperature - z[:, None])
    is_label = torch.arange(logits.shape[1], device=logits.device)[None] == labels[:, None]
    return ((is_label.float() - shares) * (pull / temperature)[:, None]).to(logits.dtype)


def _by_pieces(
    measure: Callable[..., tuple[torch.Tensor, ...]],
    fusion: bool,
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, ...]:
    if fusion:
        return tuple(_compiled(measure)(logits, labels, temperature))
    rows = max(1, PIECE // logits.shape[1])
    parts = [measure(*pair, temperature) for pair in zip(logits.split(rows), labels.split(rows), strict=True)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


@cache
def _compiled(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
    return torch.compile(function, dynamic=True)
