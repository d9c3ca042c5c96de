"""The head of a causal model, a few rows at a time: logits of a whole micro-batch never exist at once.

    hidden [M, H] -> for each piece of rows: logits [n, V] -> what `of` makes of them, float32[n] each

A piece keeps its hidden rows alone; backward computes its logits again, then their gradient, then frees both. The
pieces run inside the model's own forward pass, in the place of its head, so FSDP holds the head's weight whenever it is
used. Gradients are those of the head in one piece, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

HEAD = "lm_head"
LOGITS = 2**26
"""Logits that exist at once at most, unless one row alone has more."""

RESCALING = (
    *("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
    *("logit_scale", "logits_scaling", "lm_head_multiplier"),
)
"""Settings of models that change logits after their head; those have it in one piece."""

Of = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""of(logits float32[n, V], rows beside them [n, ...]) -> float32[n] twice."""

Rows = Callable[[torch.Tensor], torch.Tensor]
"""[n, ...] -> logits float32[n, V]."""


def rows_at_once(model: torch.nn.Module, limit: int) -> int | None:
    """Rows of a piece, or None for a model whose head must stay in one."""
    config = getattr(model, "config", None)
    config = config.get_text_config() if config is not None else None
    output: Callable[[], object] | None = getattr(model, "get_output_embeddings", None)
    if (
        config is None
        or not hasattr(model, HEAD)
        or output is None
        or output() is not model.get_submodule(HEAD)  # more than one layer makes logits
        or any(getattr(config, name, None) not in (None, 1.0) for name in RESCALING)
    ):
        return None
    return max(1, limit // int(config.vocab_size))


def is_plain(model: torch.nn.Module) -> bool:
    """Whether logits are what one linear layer makes, and nothing behind it reads them."""
    return rows_at_once(model, LOGITS) is not None and type(model.get_submodule(HEAD)) is torch.nn.Linear


def logits_on(device: torch.device) -> int:
    """How many exist at once on a card, in bf16: a sixteenth of its memory. It depends on the kind of card alone, so
    the same step is cut alike wherever it is repeated."""
    if device.type != "cuda":
        return LOGITS
    return max(LOGITS, torch.cuda.get_device_properties(device).total_memory // (16 * 2))


@contextmanager
def in_pieces(model: torch.nn.Module, rows: int, of: Of, beside: torch.Tensor) -> Iterator[None]:
    """Inside, the model's logits are float32[1, M, 2] instead: the two columns that `of` makes of them. beside: [M,
    ...], of which each piece gets its rows."""
    head: Callable[[torch.Tensor], torch.Tensor] = model.get_submodule(HEAD).forward

    def piece(hidden: torch.Tensor, bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return of(head(hidden).float(), bounds)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        pairs = zip(hidden[0].split(rows), beside.split(rows), strict=True)
        parts = [checkpoint(piece, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
        return torch.stack([torch.cat(column)[None] for column in zip(*parts, strict=True)], dim=-1)

    with instead(model.get_submodule(HEAD), forward):
        yield


def as_they_are(logits: torch.Tensor) -> torch.Tensor:
    """In fp32."""
    return logits.float()


def hidden_rows(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Rows]:
    """What `run`, a forward pass of the frozen `model`, hands its head: [M, H]; and what makes logits float32[n, V] of
    some rows of it, at any later time. A collective where the head is spread over ranks and freed after use."""
    with instead(model.get_submodule(HEAD), lambda hidden: hidden):
        hidden = run()
    head = model.get_submodule(HEAD)
    parameters = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().to(hidden.dtype)
        for name, tensor in head.named_parameters()
    }

    join: Rows = getattr(head, "join_logits", as_they_are)  # of a head whose words are shared by ranks

    def logits(rows: torch.Tensor) -> torch.Tensor:
        partial = torch.nn.functional.linear(rows, parameters["weight"], parameters.get("bias")).float()
        return join(partial)

    return hidden, logits


@contextmanager
def instead(head: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside, a head computes `forward`."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
