"""One pass over the logits gives what log softmax gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.trainers.backends.models import label_logprobs
from millrace.trainers.backends.models.label_logprobs import label_logprobs as of


def plain(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = torch.log_softmax(logits.double() / temperature, -1)
    return distribution.gather(-1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    words=st.integers(1, 70),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    scale=st.sampled_from([0.1, 3.0, 40.0]),
    piece=st.sampled_from([1, 64, 2**24]),
    seed=st.integers(0, 1000),
)
def test_numbers_and_gradients_are_those_of_log_softmax(
    rows: int, words: int, temperature: float, scale: float, piece: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 8, generator=draw)
    pull = torch.randn(rows, generator=draw)
    labels = torch.randint(0, words, (rows,), generator=draw)
    head = torch.randn(words, 8, generator=draw) * scale
    weights = [head.clone().requires_grad_(), head.double().requires_grad_()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(label_logprobs, "PIECE", piece)
        logprobs, entropies = of(hidden @ weights[0].T, labels, temperature)
        (logprobs * pull).sum().backward()
    right, spread = plain(hidden.double() @ weights[1].T, labels, temperature)
    (right * pull).sum().backward()
    assert torch.allclose(logprobs.double(), right, atol=1e-4 * scale, rtol=1e-5)
    assert torch.allclose(entropies.double(), spread, atol=1e-4 * scale, rtol=1e-4)
    assert weights[0].grad is not None
    assert weights[1].grad is not None
    assert torch.allclose(weights[0].grad.double(), weights[1].grad, atol=1e-4, rtol=1e-4)


def test_bf16_logits_stay_bf16_and_become_their_gradient() -> None:
    logits = torch.randn(5, 11).bfloat16()
    learning = logits.clone().requires_grad_()
    copy = learning * 1  # what a head makes: a tensor whose memory is its own
    labels = torch.arange(5)
    logprobs, _ = of(copy, labels, 1.0)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    right = torch.nn.functional.one_hot(labels, 11) - logits.float().softmax(-1)
    assert learning.grad is not None
    assert torch.allclose(learning.grad.float(), right, atol=1e-2)
    assert torch.equal(copy.detach(), learning.grad)


def test_compiled_formulas_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced, without making code for a device."""
    monkeypatch.setattr(
        label_logprobs, "_compiled", lambda function: torch.compile(function, dynamic=True, backend="eager")
    )
    logits, labels = torch.randn(7, 13), torch.randint(0, 13, (7,))
    grown = [logits.clone().requires_grad_() for _ in range(2)]
    for leaf, fusion in zip(grown, (False, True), strict=True):
        logprobs, entropies = of(leaf * 1, labels, 0.7, fusion=fusion)
        (logprobs.sum() + 0 * entropies.sum()).backward()
    first, second = (leaf.grad for leaf in grown)
    assert first is not None
    assert second is not None
    assert torch.allclose(first, second, atol=1e-6)
