"""What a case of the conformance suite is, and the three models that all cases share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.trainers.backends.layout import parse
from millrace.trainers.weights.state import State
from tests.support.samples import small_state

QWEN2, QWEN3, MOE = "qwen2", "qwen3", "qwen3_moe"
MODELS = (QWEN2, QWEN3, MOE)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Against one process, worst over steps: absolute loss, relative gradient norm, absolute weight."""

    loss: float = 1.5e-6
    norm: float = 5e-7
    weight: float = 5e-5


DENSE = Tolerance()
EXPERTS = Tolerance(norm=1.5e-6, weight=2.3e-4)
"""Experts sum their gradients over more ranks, in an order of their own: 9e-7 where kernels are as wide as AVX2,
the same as Megatron's; and Adam takes the sign of gradients near zero."""


@dataclass(frozen=True, slots=True)
class Case:
    """One layout of one backend on one model. options: of its backend, `called` so in the table. ci: part of every run
    of the tests, not of `make conformance` alone. error: what it must fail with, where upstream cannot run it on a CPU
    (a regular expression). prepare: called once in each process before the backend is imported; a function at the top
    of a module."""

    layout: str
    model: str
    ci: bool = False
    tolerance: Tolerance | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    called: str = ""
    prepare: Callable[[], None] | None = None

    @property
    def world(self) -> int:
        """Processes it takes."""
        return parse(self.layout).world

    @property
    def backend(self) -> str:
        """Whose processes it runs in."""
        return parse(self.layout).backend

    @property
    def allowed(self) -> Tolerance:
        """Its tolerance, or the model's."""
        return self.tolerance or (EXPERTS if self.model == MOE else DENSE)

    def __str__(self) -> str:
        options = self.called or ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.layout}{',' if options else ''}{options}-{self.model}"


def model_state(model: str, **settings: Any) -> State:
    """Random weights, norms and biases perturbed. Every size divides by 4: heads, vocabulary, layers, experts."""
    more: dict[str, Any] = settings
    if model == MOE:
        more = {
            **settings,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return small_state(
        model, seed=3, hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, **more
    )
