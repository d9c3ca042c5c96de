"""The torch backend in one process: steps, skipped steps, state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from millrace.trainers.algorithms.base import Algorithm, Sums
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.packing import MicroBatch, pack
from millrace.trainers.errors import BadConfiguration, CheckpointError, NotFormed
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State
from tests.support.samples import random_samples, small_state
from tests.support.steps import train_share


def backend(state: State, adam: Adam | None = None) -> TorchBackend:
    made = TorchBackend(adam, device="cpu")
    made.form(0, 1, None, 30.0)
    made.load(state)
    return made


def gathered(of: TorchBackend) -> State:
    state = of.gather()
    assert state is not None
    return state


def step(of: TorchBackend, algorithm: Algorithm, seed: int = 0) -> State:
    train_share(Trainer(of, algorithm, Schedule(1e-3)), random_samples(seed), 0, 1)
    return gathered(of)


def test_a_step_equals_plain_pytorch() -> None:
    """Against AdamW and clip_grad_norm_ on the same model, written out."""
    state, samples = small_state(), random_samples(0)
    ours = backend(state, Adam(weight_decay=0.01, clip=0.3))
    reports = [train_share(Trainer(ours, Sft(), Schedule(1e-3)), samples, 0, 1) for _ in range(3)]

    plain = backend(state).model
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, foreach=False
    )
    batch = pack(samples)
    for report in reports:
        optimizer.zero_grad()
        logits = plain(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=torch.zeros(1, 1, 1, 1),
            runs=batch.runs,
        ).logits[0, batch.at]
        loss = torch.nn.functional.cross_entropy(logits, batch.labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        optimizer.step()
        assert report.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
        assert report.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        assert report.metrics["grad_norm"] > 0.3, "the clip is at work"
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gathered(ours).weights[name], parameter.detach(), rtol=0, atol=1e-6)


def test_continuing_from_a_state_gives_the_same_bytes_as_never_stopping() -> None:
    unbroken = backend(small_state())
    for seed in range(3):
        last = step(unbroken, policy("grpo"), seed)
    resumed = small_state()
    for seed in range(3):
        resumed = step(backend(resumed), policy("grpo"), seed)
    assert resumed.step == last.step == 6
    assert checkpoint.fingerprint(resumed) == checkpoint.fingerprint(last)


def test_gathering_copies() -> None:
    of = backend(small_state())
    before = gathered(of)
    kept = checkpoint.fingerprint(before)
    step(of, policy("grpo"))
    assert checkpoint.fingerprint(before) == kept


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2", {"attention_dropout": 0.3}),
        ("gpt2", {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "tie_word_embeddings": True}),
    ],
)
def test_models_train_without_dropout(kind: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """So the first ratio of a batch is 1, and nothing is drawn."""
    with caplog.at_level("INFO", "millrace.models"):
        of = backend(small_state(kind, **settings))
    assert f"{kind} trains without its dropout ({min(settings)}" in caplog.text
    assert of.model.training
    samples = random_samples(0, groups=1)
    micro = pack(samples)
    drawn = torch.random.get_rng_state()
    (scored,) = of.score([micro], 1.0)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    grpo = policy("grpo", minibatches=1, recompute=True)
    weights = grpo.weigh(samples, None, {"proximal": micro.split(scored)})
    micro = micro.attach_samples(weights)
    result = of.step([micro], grpo, grpo.count(micro), 1e-3, "actor")
    assert result.sums["ratio"] == result.sums["kept"], "every ratio is 1"
    assert result.grad_norm > 0


class Poisoned(Sft):
    """SFT whose loss goes through `poison` while `sick`."""

    def __init__(self, poison: Callable[[torch.Tensor], torch.Tensor], sick: tuple[int, ...]) -> None:
        super().__init__(minibatches=2)
        object.__setattr__(self, "poison", poison)
        object.__setattr__(self, "calls", iter(range(100)))
        object.__setattr__(self, "sick", sick)

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        loss, sums = super().loss(logprobs, entropy, batch)
        return (self.poison(loss) if next(self.calls) in self.sick else loss), sums


POISONS = [lambda loss: loss * torch.nan, lambda loss: loss * torch.inf, lambda loss: torch.sqrt(loss - loss)]


@pytest.mark.parametrize("poison", POISONS, ids=["nan", "inf", "gradient only"])
def test_a_non_finite_batch_changes_no_byte(poison: Callable[[torch.Tensor], torch.Tensor]) -> None:
    of = backend(step(backend(small_state()), policy("grpo")))
    before = checkpoint.fingerprint(gathered(of))
    report = train_share(Trainer(of, Poisoned(poison, (0, 1)), Schedule(1e-3)), random_samples(1), 0, 1)
    assert report.unchanged == "non-finite loss or gradient"
    assert (report.metrics["steps"], report.metrics["steps_skipped"]) == (0, 2)
    assert checkpoint.fingerprint(gathered(of)) == before
    assert step(of, policy("grpo"), 2).step == 4, "training goes on"


def test_one_sick_minibatch_is_skipped_alone() -> None:
    of = backend(small_state())
    report = train_share(Trainer(of, Poisoned(POISONS[0], (0,)), Schedule(1e-3)), random_samples(1), 0, 1)
    assert report.unchanged is None
    assert (report.metrics["steps"], report.metrics["steps_skipped"]) == (1, 1)
    assert all(torch.isfinite(weight).all() for weight in gathered(of).weights.values())
    assert gathered(of).step == 1


def test_use_before_form_and_load_is_refused() -> None:
    of = TorchBackend(device="cpu")
    with pytest.raises(NotFormed, match="form, then load"):
        of.gather()
    of.form(0, 1, None, 30.0)
    with pytest.raises(NotFormed, match="form, then load"):
        of.step([], Sft(), 1.0, 1e-3)
    of.load(small_state())
    of.tear_down()
    of.tear_down()
    of.abort()
    with pytest.raises(NotFormed):
        of.vocabulary  # noqa: B018


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 1), (0, 2)])
def test_impossible_groups_are_refused(rank: int, world: int) -> None:
    with pytest.raises(BadConfiguration):
        TorchBackend(device="cpu").form(rank, world, None, 30.0)


def test_weights_of_another_model_are_refused() -> None:
    small, other = small_state(), small_state(hidden_size=64)
    with pytest.raises(CheckpointError, match=r"in config\.json"):
        backend(State(other.weights, small.assets))
    with pytest.raises(CheckpointError, match=r"missing .*lm_head"):
        backend(State({k: v for k, v in small.weights.items() if k != "lm_head.weight"}, small.assets))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        backend(State(small.weights, {}))


def test_tied_embeddings_train() -> None:
    state = small_state(tie_word_embeddings=True)
    assert "lm_head.weight" not in state.weights
    trained = step(backend(state), Sft())
    assert not torch.equal(trained.weights["model.embed_tokens.weight"], state.weights["model.embed_tokens.weight"])
