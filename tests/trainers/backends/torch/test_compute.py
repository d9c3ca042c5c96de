"""How passes are computed changes memory and rounding, never what is learned: heads in pieces, bf16 with fp32 masters,
checkpointed layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.distill import Distill
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.models.forward import token_comparison, token_logprobs
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.batches.packing import pack
from millrace.trainers.learning import Report, Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State
from tests.support.ranks import Ranks
from tests.support.samples import VOCABULARY, random_samples, small_state
from tests.support.steps import HELD, train_share, train_with

WHOLE = 10**9


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made, forward or backward."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def trained(
    compute: Compute, algorithm: Algorithm, state: State | None = None, steps: int = 3
) -> tuple[list[Report], State]:
    backend = TorchBackend(device="cpu", compute=compute)
    backend.form(0, 1, None, 30.0)
    trainer = Trainer(backend, algorithm, Schedule(1e-3), budget=150, held=HELD)
    trainer.load(state or small_state())
    reports = [train_share(trainer, random_samples(seed), 0, 1, seed) for seed in range(steps)]
    gathered = backend.gather()
    assert gathered is not None
    return reports, gathered


def gradients(logits: int, kind: str, **settings: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    state, batch = small_state(kind, **settings), pack(random_samples(0))
    model = build(state.assets, state.weights)
    logprobs, entropy = token_logprobs(model, batch, 0.7, logits)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), entropy, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize(("kind", "settings"), [("qwen2", {}), ("qwen3", {"tie_word_embeddings": True})])
def test_a_head_in_pieces_is_exact(kind: str, settings: dict[str, Any], rows: int) -> None:
    whole, pieces = gradients(WHOLE, kind, **settings), gradients(rows * VOCABULARY, kind, **settings)
    torch.testing.assert_close(pieces[0], whole[0], rtol=0, atol=3e-6)
    torch.testing.assert_close(pieces[1], whole[1], rtol=0, atol=3e-6)
    assert not pieces[1].requires_grad
    for ours, theirs in zip(pieces[2], whole[2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6 * float(theirs.abs().max()))


def test_entropies_learn_where_that_is_asked() -> None:
    """Against their derivative by the logits, -p (log p + H); whole and in pieces."""
    state, batch = small_state(), pack(random_samples(2, groups=2))
    factors = torch.linspace(-1, 1, batch.trainable)
    found = []
    for limit in (WHOLE, 7 * VOCABULARY):
        model = build(state.assets, state.weights)
        logprobs, entropy = token_logprobs(model, batch, 0.7, limit, entropy_learns=True)
        (entropy * factors + logprobs).sum().backward()
        found.append(model.get_submodule("lm_head").weight.grad)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5)

    model = build(state.assets, state.weights)
    hidden: list[torch.Tensor] = []
    head = model.get_submodule("lm_head")
    head.register_forward_hook(lambda module, inputs, output: hidden.append(inputs[0][0].detach()))
    with torch.no_grad():
        token_logprobs(model, batch, 0.7, WHOLE)
        logp = torch.log_softmax(head(hidden[0])[-batch.trainable :] / 0.7, -1)
        p, entropy = logp.exp(), -(logp.exp() * logp).sum(-1, keepdim=True)
        by_logit = -p * (logp + entropy) * factors[:, None] - p
        by_logit[torch.arange(batch.trainable), batch.labels] += 1
        expected = (by_logit / 0.7).T @ hidden[0]
    torch.testing.assert_close(found[0], expected, rtol=0, atol=2e-5)


def test_a_head_in_pieces_by_finite_differences() -> None:
    state, batch = small_state(hidden_size=16), pack(random_samples(1, groups=1, group_size=2))
    model = build(state.assets, state.weights).double()
    weight = model.get_submodule("lm_head").weight
    assert isinstance(weight, torch.nn.Parameter)

    def loss() -> torch.Tensor:
        return token_logprobs(model, batch, 1.0, 3 * VOCABULARY)[0].sum()

    loss().backward()
    assert weight.grad is not None
    for row, column in [(0, 0), (5, 3), (int(batch.labels[0]), 7)]:
        values = []
        for step in (-1e-3, 1e-3):
            with torch.no_grad():
                weight[row, column] += step
                values.append(float(loss()))
                weight[row, column] -= step
        # Log-probabilities come out in fp32, so differences are good to a few digits.
        assert float(weight.grad[row, column]) == pytest.approx((values[1] - values[0]) / 2e-3, rel=2e-2, abs=2e-2)


def test_logits_of_the_whole_batch_never_exist() -> None:
    """With a vocabulary that dwarfs the model, the largest tensor of a step is a piece of logits or the head itself."""
    samples = random_samples(0, groups=8, vocabulary=64)
    state = small_state(vocab_size=2048, hidden_size=16, intermediate_size=16)
    batch, sizes = pack(samples), {}
    for limit in (WHOLE, 20 * 2048):
        model = build(state.assets, state.weights)
        with Largest() as seen:
            token_logprobs(model, batch, 1.0, limit)[0].sum().backward()
        sizes[limit] = seen.elements
    assert sizes[WHOLE] == batch.trainable * 2048
    assert sizes[20 * 2048] == 20 * 2048
    assert batch.trainable > 200


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_teacher_is_compared_with_in_pieces(direction: Any) -> None:
    outcomes = [trained(Compute(logits=n), Distill(direction=direction)) for n in (WHOLE, 9 * VOCABULARY)]
    assert_close(outcomes[1], outcomes[0])
    state, teacher = small_state(), small_state(seed=6, vocab_size=2048, hidden_size=16)
    student = small_state(vocab_size=2048, hidden_size=16)
    batch = pack(random_samples(0, groups=8))
    models = build(student.assets, student.weights), build(teacher.assets, teacher.weights)
    with Largest() as seen:
        token_comparison(models, ({}, {}), batch, 1.0, lambda ours, theirs: (ours - theirs).sum(-1), 20 * 2048)
    assert seen.elements == 20 * 2048
    assert state.step == 0


def test_a_model_that_rescales_its_logits_has_them_in_one_piece() -> None:
    state = small_state("gemma2", final_logit_softcapping=5.0, query_pre_attn_scalar=8)
    batch = pack(random_samples(0))
    model = build(state.assets, state.weights)
    with torch.no_grad():
        whole, pieces = (token_logprobs(model, batch, 1.0, limit)[0] for limit in (WHOLE, VOCABULARY))
    assert torch.equal(whole, pieces)


def assert_close(ours: tuple[list[Report], State], theirs: tuple[list[Report], State]) -> None:
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert mine.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1.5e-6)
        assert mine.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=2e-6)
    for name, weight in theirs[1].weights.items():
        torch.testing.assert_close(ours[1].weights[name], weight, rtol=0, atol=5e-5)


@pytest.mark.parametrize("algorithm", [policy("decoupled"), policy("ppo"), Sft()], ids=lambda a: a.name)
@pytest.mark.parametrize(
    "compute", [Compute(logits=9 * VOCABULARY), Compute(checkpointing=True)], ids=["head", "layers"]
)
@pytest.mark.slow
def test_steps_are_the_same(compute: Compute, algorithm: Algorithm) -> None:
    assert_close(trained(compute, algorithm), trained(Compute(), algorithm))


def test_checkpointed_layers_keep_their_inputs_alone() -> None:
    kept = {}
    for on in (False, True):
        state = small_state(num_hidden_layers=4)
        model = build(state.assets, state.weights)
        Compute(checkpointing=on).prepare(model, (), torch.device("cpu"))
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            token_logprobs(model, pack(random_samples(0)), 1.0)
        kept[on] = sum(sizes)
    assert kept[True] < kept[False] / 4


def test_bf16_keeps_masters_moments_and_loss_in_fp32() -> None:
    plain, narrow = (trained(Compute(bf16=on), policy("grpo"), steps=4) for on in (False, True))
    state = narrow[1]
    tensors = [*state.weights.values(), *(t for slot in state.moments.values() for t in slot.values())]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert any(not torch.equal(w, w.bfloat16().float()) for w in state.weights.values()), "masters are finer than bf16"
    for mine, other in zip(narrow[0], plain[0], strict=True):
        assert mine.metrics["entropy"] == pytest.approx(other.metrics["entropy"], rel=1e-2)
        assert mine.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=0.05)
        assert mine.metrics["loss"] != other.metrics["loss"], "it computed in bf16"


def test_small_updates_are_not_lost_to_bf16() -> None:
    """Steps of 1e-6 vanish in a bf16 weight of 1; in its master they add up."""
    begin = small_state()
    backend = TorchBackend(device="cpu", compute=Compute(bf16=True))
    backend.form(0, 1, None, 30.0)
    trainer = Trainer(backend, Sft(), Schedule(1e-6))
    trainer.load(begin)
    for seed in range(3):
        train_share(trainer, random_samples(0), 0, 1, seed)
    state = backend.gather()
    assert state is not None
    moved = (state.weights["model.norm.weight"] - begin.weights["model.norm.weight"]).abs()
    assert 2e-6 < float(moved.median()) < 4e-6


def test_a_bf16_run_continues_from_its_checkpoint(tmp_path: Any) -> None:
    """Also where the version on disk is bf16: its masters lie beside it."""
    begin = small_state(dtype="bfloat16")
    unbroken = trained(Compute(bf16=True), policy("grpo"), begin, steps=2)[1]
    half = trained(Compute(bf16=True), policy("grpo"), begin, steps=1)[1]
    resumed = checkpoint.read(checkpoint.write(tmp_path, 1, half).path)
    backend = TorchBackend(device="cpu", compute=Compute(bf16=True))
    backend.form(0, 1, None, 30.0)
    trainer = Trainer(backend, policy("grpo"), Schedule(1e-3), budget=150)
    trainer.load(resumed)
    train_share(trainer, random_samples(1), 0, 1, 1)
    after = backend.gather()
    assert after is not None
    assert checkpoint.fingerprint(after) == checkpoint.fingerprint(unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [False, True], ids=["kept", "resharded"])
@pytest.mark.parametrize(
    ("compute", "algorithm"),
    [
        (Compute(logits=9 * VOCABULARY), policy("ppo")),
        (Compute(logits=9 * VOCABULARY), Distill()),
        (Compute(logits=9 * VOCABULARY, checkpointing=True), policy("decoupled")),
    ],
    ids=["ppo", "distill", "both"],
)
def test_ranks_agree_with_one(ranks: Ranks, compute: Compute, algorithm: Algorithm, reshard: bool) -> None:
    data = [random_samples(seed) for seed in range(2)]
    (alone,) = ranks.run(train_with, 1, Compute(), False, small_state(), algorithm, data)
    together = ranks.run(train_with, 2, compute, reshard, small_state(), algorithm, data)
    assert_close(together[0], alone)


@pytest.mark.slow
def test_ranks_compute_in_bf16_what_one_does(ranks: Ranks) -> None:
    """Masters, moments and losses of two ranks against one, as near as bf16 copies of weights that differ in their last
    bit allow."""
    data = [random_samples(seed) for seed in range(2)]
    compute = Compute(bf16=True, checkpointing=True)
    (alone,) = ranks.run(train_with, 1, compute, False, small_state(), policy("grpo"), data)
    together = ranks.run(train_with, 2, compute, False, small_state(), policy("grpo"), data)
    for mine, other in zip(together[0][0], alone[0], strict=True):
        assert mine.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=0.02)
    assert {tensor.dtype for tensor in together[0][1].weights.values()} == {torch.float32}
    for name, weight in alone[1].weights.items():
        moved = (weight - small_state().weights[name]).norm()
        assert float((together[0][1].weights[name] - weight).norm() / moved) < 0.5
