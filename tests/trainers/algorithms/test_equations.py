"""The equations that pages show, computed line by line, give what the code gives: loss and gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.trainers.algorithms.base import Algorithm, Scores
from millrace.trainers.algorithms.kto import Kto
from millrace.trainers.algorithms.names import PAIRS
from millrace.trainers.algorithms.presets import PRESETS
from millrace.trainers.algorithms.registry import OTHERS, algorithm, names
from millrace.trainers.batches.packing import PROXIMAL, REFERENCE, TEACHER, VALUES, MicroBatch
from millrace.trainers.batches.sample import Sample
from tests.support.samples import random_samples
from tests.trainers.algorithms.equations import INSIDE, NEAR, SYMBOLS, Equation
from tests.trainers.algorithms.table import PAGES
from tests.trainers.algorithms.weighing import current, draw_scores, weighed

Values = SimpleNamespace
EQUATIONS: dict[str, Equation] = {name: page.equation for name, page in PAGES.items()}
CLAMP = {"rejection": {"action": "clamp", "upper": 1.1}}
BITING: dict[str, dict[str, Any]] = {
    "dapo": {"max_new_tokens": 7, "overlong_tokens": 5},
    "ppo": {"discount": 0.9, "gae_lambda": 0.8},
    "reinforce++": {"kl_coef": 0.5, "discount": 0.9},
    "reinforce++-baseline": {"kl_coef": 0.5, "gae_lambda": 0.8},
    "decoupled": CLAMP,
    "decoupled-loglinear": CLAMP,
    "tis": CLAMP,
    "icepop": {"rejection": {"lower": 0.8, "upper": 1.3}},
    "kpop": {"rejection": {"metric": "binary_kl", "upper": 1e-3}},
    "distill-on-policy": {"teacher_coef": 0.5, "rl_coef": 0.7},
    "simpo": {"beta": 1.5, "gamma": 0.7},
    "orpo": {"beta": 0.6},
    "kto": {"beta": 0.8, "threshold": 1.0, "desirable_weight": 1.3, "undesirable_weight": 0.7},
    "awr": {"beta": 0.5, "weight_clip": 2.0},
    "distill-forward": {"temperature": 0.7},
    "distill-reverse": {"temperature": 0.7},
}
"""Knobs with which every term shows on a few short samples."""


def to_go(e: Values, rewards: torch.Tensor) -> torch.Tensor:
    out = rewards.clone()
    for t in range(len(out) - 2, -1, -1):
        if e.owner[t] == e.owner[t + 1]:
            out[t] += e.k.discount * e.k.gae_lambda * out[t + 1]
    return out


def later(e: Values, values: torch.Tensor) -> torch.Tensor:
    return torch.where(e.last, 0.0, torch.cat([values[1:], values[:1]]))


def by(kinds: torch.Tensor, of: Callable[[torch.Tensor], Any], values: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(values)
    for kind in kinds.unique():
        out[kinds == kind] = of(values[kinds == kind])
    return out


def of_group(e: Values, of: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    return by(e.group, of, e.r)


def of_sample(e: Values, values: torch.Tensor) -> torch.Tensor:
    sums = [
        torch.zeros(e.samples).double().index_add(0, e.owner, x * e.keep) for x in (values, torch.ones_like(values))
    ]
    return (sums[0] / sums[1].clamp(min=1))[e.owner]


def normed(e: Values, values: torch.Tensor) -> torch.Tensor:
    kept = values[e.part]
    return torch.where(e.part, (values - kept.mean()) / (kept.std() + e.k.advantage_norm.eps), 0.0)


def clipped(e: Values, u: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return -torch.minimum(u * a, u.clamp(1 - e.k.clip_low, 1 + e.k.high) * a)


def bernoulli(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def second_moment(e: Values) -> torch.Tensor:
    moments = (e.prox - e.behav) ** 2
    rest = moments[e.keep > 0].sort().values
    while rest.mean() >= e.k.m2_threshold:
        rest = rest[:-1]
    return (moments <= rest[-1]).double()


def of_reply(e: Values, sign: int, of: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    inside = ((e.pair == pair) & (e.side == sign) & ~values.isnan() for pair in e.pair.unique())
    return torch.stack([of(values[here]) for here in inside])


def of_owners(e: Values, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(e.samples).double().index_add(0, e.owner, values)


def replies(values: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"chosen": values(1), "rejected": values(-1)}


RULES: dict[str, Callable[[Values], Any]] = {
    "the groups whose recorded r are not all equal": lambda e: None,
    "r + overlong_factor clip((max_new_tokens - overlong_tokens - n) / overlong_tokens, -1, 0)": lambda e: (
        e.r
        + e.k.overlong_factor * ((e.k.max_new_tokens - e.k.overlong_tokens - e.n) / e.k.overlong_tokens).clamp(-1, 0)
    ),
    "(r - mean_G r) / (std_G r + eps)": lambda e: (
        (e.r - of_group(e, torch.mean)) / (of_group(e, torch.std) + e.k.reward_norm.eps)
    ),
    "r - mean_G r": lambda e: e.r - of_group(e, torch.mean),
    "r - (sum_G r - r) / (n_G - 1)": lambda e: e.r - (of_group(e, torch.sum) - e.r) / (of_group(e, len) - 1),
    "(r - mean_G r) / (std_B r + eps)": lambda e: (
        (e.r - of_group(e, torch.mean)) / (e.r[e.teaches].std() + e.k.reward_norm.eps)
    ),
    "[t is last] r - keep_t kl_coef clip(behav_t - ref_t, -10, 10)": lambda e: (
        e.last * e.r[e.at] - e.keep * e.k.kl_coef * (e.behav - e.ref).clamp(-10, 10)
    ),
    "[t is last] r - keep_t kl_coef clip((behav_t - ref_t)^2 / 2, -10, 10)": lambda e: (
        e.last * e.r[e.at] - e.keep * e.k.kl_coef * ((e.behav - e.ref) ** 2 / 2).clamp(-10, 10)
    ),
    "r": lambda e: e.r[e.at],
    "(r - mean_T r) / (std_T r + eps)": lambda e: normed(e, e.r[e.at]),
    "r_t + discount gae_lambda A_{t+1}": lambda e: to_go(e, e.r_t),
    "[t is last] r + discount V_{t+1} - V_t": lambda e: e.last * e.r[e.at] + e.k.discount * later(e, e.V) - e.V,
    "delta_t + discount gae_lambda A_{t+1}": lambda e: to_go(e, e.delta_t),
    "A_t + V_t": lambda e: e.A_t + e.V,
    "(A_t - mean_T A) / (std_T A + eps)": lambda e: normed(e, e.A_t),
    "mean_i A_t": lambda e: of_sample(e, e.A_t),
    "exp(logp_t - behav_t)": lambda e: (e.logp - e.behav).exp(),
    "exp(mean_i (logp_t - behav_t))": lambda e: of_sample(e, e.logp - e.behav).exp(),
    "clip((v_prox - v_behav) / (v_theta - v_behav), 0, 1)": lambda e: (
        (e.v_prox - e.v_behav) / (e.v_theta - e.v_behav)
    ).clamp(0, 1),
    "behav_t + alpha_t (stopgrad(logp_t) - behav_t)": lambda e: e.behav + e.alpha_t * (e.logp.detach() - e.behav),
    "exp(logp_t - prox_t)": lambda e: (e.logp - e.prox).exp(),
    "exp(prox_t - behav_t)": lambda e: (e.prox - e.behav).exp(),
    "min(exp(prox_t - behav_t), upper)": lambda e: (e.prox - e.behav).exp().clamp(max=e.k.rejection.upper),
    "1 where lower <= w_t <= upper, else 0": lambda e: (
        (e.w_t >= e.k.rejection.lower) & (e.w_t <= e.k.rejection.upper)
    ).double(),
    "p log(p / q) + (1 - p) log((1 - p) / (1 - q))": lambda e: bernoulli,
    "1 where max(KL(p_t, q_t), KL(q_t, p_t)) <= upper, else 0": lambda e: (
        torch.maximum(bernoulli(e.prox.exp(), e.behav.exp()), bernoulli(e.behav.exp(), e.prox.exp()))
        <= e.k.rejection.upper
    ).double(),
    "0 for the largest (prox_t - behav_t)^2 of the batch, else 1": second_moment,
    "-min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t)": lambda e: clipped(e, e.u_t, e.A_t),
    "-min(u_i A_i, clip(u_i, 1 - clip_low, 1 + clip_high) A_i)": lambda e: clipped(e, e.u_i, e.A_i),
    "sapo_tau_pos where A_t > 0, else sapo_tau_neg": lambda e: torch.where(
        e.A_t > 0, e.k.sapo_tau_pos, e.k.sapo_tau_neg
    ).double(),
    "-(4 / tau) sigmoid(tau (u_t - 1)) A_t": lambda e: -4 / e.tau * torch.sigmoid(e.tau * (e.u_t - 1)) * e.A_t,
    "-stopgrad(clip(u_t, 1 - clip_low, 1 + clip_high)) A_t logp_t": lambda e: (
        -e.u_t.clamp(1 - e.k.clip_low, 1 + e.k.high).detach() * e.A_t * e.logp
    ),
    "sign(A_i) min(sign(A_i) (logp_t - behav_t), sign(A_i) clip(logp_t - behav_t, -clip_low, clip_high))": lambda e: (
        e.A_i.sign()
        * torch.minimum(
            e.A_i.sign() * (e.logp - e.behav),
            e.A_i.sign() * (e.logp - e.behav).clamp(-e.k.clip_low, e.k.high),
        )
    ),
    "-exp(mean_i d_t) A_i": lambda e: -of_sample(e, e.d_t).exp() * e.A_i,
    "sum_i (sum_{t in i} keep_t / n_i) L_i / S": lambda e: (
        (e.keep * e.L_i / torch.bincount(e.owner)[e.owner]).sum() / e.samples
    ),
    "u_t (stopgrad(logp_t) - teacher_t)": lambda e: e.u_t * (e.logp.detach() - e.teacher),
    "sum_t keep_t L_t / N": lambda e: (e.keep * e.L_t).sum() / e.N,
    "sum_t keep_t w_t L_t / N": lambda e: (e.keep * e.w_t * e.L_t).sum() / e.N,
    "sum_t keep_t m_t w_t L_t / N": lambda e: (e.keep * e.m_t * e.w_t * e.L_t).sum() / e.N,
    "sum_t keep_t (rl_coef L_t + teacher_coef T_t) / N": lambda e: (
        (e.keep * (e.k.rl_coef * e.L_t + e.k.teacher_coef * e.T_t)).sum() / e.N
    ),
    "sum_t keep_t max((v_t - R_t)^2, (clip(v_t, V_t - value_clip, V_t + value_clip) - R_t)^2) / (2 N)": lambda e: (
        (
            e.keep
            * torch.maximum(
                (e.v - e.R_t) ** 2, (torch.clip(e.v, e.V - e.k.value_clip, e.V + e.k.value_clip) - e.R_t) ** 2
            )
        ).sum()
        / (2 * e.N)
    ),
    "log softmax(logits)_t": lambda e: e.logp,
    "-logp_t": lambda e: -e.logp_t,
    "min(exp(r / beta), weight_clip)": lambda e: (e.r[e.at] / e.k.beta).exp().clamp(max=e.k.weight_clip),
    "sum_{t in y} keep_t (logp_t - ref_t)": lambda e: (
        of_owners(e, e.keep * (e.logp - e.ref))
        if isinstance(e.k, Kto)
        else replies(lambda sign: of_reply(e, sign, torch.sum, e.keep * (e.logp - e.ref)))
    ),
    "sum_{t in y} keep_t (logp_t - ref_t) / sum_{t in y} keep_t": lambda e: replies(
        lambda sign: of_reply(e, sign, torch.sum, e.keep * (e.logp - e.ref)) / of_reply(e, sign, torch.sum, e.keep)
    ),
    "sum_{t in y} keep_t logp_t / sum_{t in y} keep_t": lambda e: replies(
        lambda sign: of_reply(e, sign, torch.sum, e.keep * e.logp) / of_reply(e, sign, torch.sum, e.keep)
    ),
    "-sum_pairs log sigmoid(beta Delta - gamma) / P": lambda e: (
        -torch.sigmoid(e.k.beta * e.Delta - e.k.gamma).log().mean()
    ),
    "h_y - log(1 - exp(h_y))": lambda e: {side: h - (1 - h.exp()).log() for side, h in e.h_y.items()},
    "o_chosen - o_rejected": lambda e: e.o_y["chosen"] - e.o_y["rejected"],
    "-sum_pairs (h_chosen + beta log sigmoid(Delta)) / P": lambda e: (
        -(e.h_y["chosen"] + e.k.beta * torch.sigmoid(e.Delta).log()).mean()
    ),
    "max(0, mean_U sum_{t in y} (prox_t - ref_t))": lambda e: (
        of_owners(e, (e.prox - e.ref) * e.unrated)[e.unrated_samples].mean().clamp(min=0)
    ),
    "1 where r > threshold, else -1": lambda e: torch.where(e.reward > e.k.threshold, 1.0, -1.0),
    "desirable_weight where s_y > 0, else undesirable_weight": lambda e: torch.where(
        e.s_y > 0, e.k.desirable_weight, e.k.undesirable_weight
    ),
    "sum_y lambda_y sigmoid(-s_y beta (h_y - z)) / R": lambda e: (
        e.lambda_y * torch.sigmoid(-e.s_y * e.k.beta * (e.h_y - e.z))
    )[e.is_rated].mean(),
    "what the value head says at the last token of y": lambda e: replies(
        lambda sign: of_reply(e, sign, torch.mean, torch.where(e.last, e.v, torch.nan))
    ),
    "h_chosen - h_rejected": lambda e: e.h_y["chosen"] - e.h_y["rejected"],
    "s_chosen - s_rejected": lambda e: e.s_y["chosen"] - e.s_y["rejected"],
    "-sum_pairs log sigmoid(beta Delta) / P": lambda e: -torch.sigmoid(e.k.beta * e.Delta).log().mean(),
    "sum_pairs (Delta - 1 / (2 beta))^2 / P": lambda e: ((e.Delta - 1 / (2 * e.k.beta)) ** 2).mean(),
    "-sum_pairs log sigmoid(Delta) / P": lambda e: -torch.sigmoid(e.Delta).log().mean(),
    "softmax(logits / temperature)_v of the student, of the teacher": lambda e: tuple(
        (x / e.k.temperature).softmax(-1) for x in (e.student, e.tutor)
    ),
    "sum_v q_v (log q_v - log p_v)": lambda e: (e.pq[1] * (e.pq[1].log() - e.pq[0].log())).sum(-1),
    "sum_v p_v (log p_v - log q_v)": lambda e: (e.pq[0] * (e.pq[0].log() - e.pq[1].log())).sum(-1),
    "sum_t keep_t D_t / N": lambda e: (e.keep * e.D_t).sum() / e.N,
}
"""The text of a line -> what it says, computed."""
KEPT = {"batch": "accepted", "p_v, q_v": "pq", "prox_t": "prox"}
"""Terms -> their names here, where they differ."""


class Pass(SimpleNamespace):
    """A forward pass whose outputs are given."""

    def tokens(self, temperature: float, *, entropy_learns: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return self.logp, torch.zeros_like(self.logp)

    def values(self) -> torch.Tensor:
        last = dict(zip(self.batch.ends.tolist(), self.v[self.last], strict=True))
        before = dict(zip(self.batch.at.tolist(), self.v, strict=True))
        said = last if self.at_ends else before
        return torch.stack([said.get(place, torch.tensor(0.0).double()) for place in range(self.batch.length)])

    def comparison(self, temperature: float, of: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        both = ((x / temperature).log_softmax(-1) for x in (self.student, self.tutor))
        return of(*both), torch.zeros_like(self.logp)


def batch_of(name: str) -> list[Sample]:
    """Groups without a reward here, with equal ones there, and a few stale tokens; or pairs."""
    if name in PAIRS:
        pairs = random_samples(4, groups=5, group_size=2, version=1)
        return [replace(s, reward=float(s.trajectory.endswith(".0"))) for s in pairs]
    samples = random_samples(4, groups=5, group_size=4, version=1)
    samples = [replace(s, reward=None if s.trajectory == "2.1" else 1.0 if s.seq == 3 else s.reward) for s in samples]
    return [replace(s, is_mismatch=name == "kto" and s.reward is None) for s in samples]


def pulls(kind: Algorithm, sample: Sample, scores: Scores) -> torch.Tensor:
    """Which of its tokens are fresh, and inside the bounds of icepop and kpop."""
    prox, behav = (torch.from_numpy(x).double() for x in (scores[PROXIMAL][sample], sample.logprobs[sample.mask != 0]))
    e = Values(k=getattr(kind, "knobs", kind), prox=prox, behav=behav, w_t=(prox - behav).exp())
    inside = [RULES[line.text](e) > 0 for line in EQUATIONS.get(kind.name, ()) if line in (INSIDE, NEAR)]
    fresh = torch.from_numpy(sample.versions[sample.mask != 0] >= 0)
    return torch.stack([fresh, *inside]).all(0)


def world(kind: Algorithm, samples: list[Sample], batch: MicroBatch) -> Pass:
    """What the symbols stand for, from the samples alone; tokens in the order of the batch."""
    members, scores = batch.members, draw_scores(samples)
    sizes = [m.trainable for m in members]
    longest: dict[str, int] = {}
    earned: dict[str, tuple[float, int]] = {}
    for s in members:
        replies = "".join(map(str, s.mask.tolist())).split("0")
        longest[s.trajectory] = max(longest.get(s.trajectory, 0), *map(len, replies))
        if s.reward is not None and pulls(kind, s, scores).any():
            earned[s.trajectory] = s.reward, s.seq
    unequal = {seq for seq in range(5) if len({reward for reward, of in earned.values() if of == seq}) > 1}
    k = getattr(kind, "knobs", kind)
    in_groups = getattr(k, "reward_norm", None) is not None
    place = {trajectory: index for index, trajectory in enumerate(earned)}
    rewarded = isinstance(kind.name, str) and kind.name in {*PRESETS, "awr", "kto"}

    def flat(row: Callable[[Sample], Any]) -> torch.Tensor:
        return torch.cat([torch.as_tensor(row(m)).expand(n) for m, n in zip(members, sizes, strict=True)])

    def scored(column: str) -> torch.Tensor:
        return flat(lambda m: scores[column][m][: m.trainable]).double()

    versions = flat(lambda m: m.versions[m.mask != 0])
    draw = torch.Generator().manual_seed(0)
    student, tutor = (torch.randn(sum(sizes), 7, generator=draw, dtype=torch.float64) for _ in range(2))
    known = flat(lambda m: m.trajectory in place).double() if rewarded else 1.0
    keep = (versions >= 0).double() * known
    return Pass(
        k=k,
        batch=batch,
        samples=len(members),
        owner=torch.arange(len(members)).repeat_interleave(torch.tensor(sizes)),
        last=torch.cat([torch.arange(n) == n - 1 for n in sizes]),
        at=flat(lambda m: place.get(m.trajectory, 0)),
        keep=keep,
        part=(keep > 0) & flat(lambda m: pulls(kind, m, scores).any() and (m.seq in unequal or not in_groups)),
        teaches=torch.tensor([seq in unequal for _, seq in earned.values()]),
        r=torch.tensor([reward for reward, _ in earned.values()]).double(),
        group=torch.tensor([seq for _, seq in earned.values()]),
        n=torch.tensor([longest[trajectory] for trajectory in earned]).double(),
        unrated=flat(lambda m: m.is_mismatch).double(),
        unrated_samples=torch.tensor([m.is_mismatch for m in members]),
        reward=torch.tensor([m.reward or 0.0 for m in members]),
        is_rated=torch.tensor([m.reward is not None and bool((m.versions[m.mask != 0] >= 0).any()) for m in members]),
        pair=flat(lambda m: m.seq),
        side=flat(lambda m: 1 if m.reward else -1),
        logp=current(batch).requires_grad_(),
        behav=flat(lambda m: m.logprobs[m.mask != 0]).double(),
        prox=scored(PROXIMAL),
        ref=scored(REFERENCE),
        teacher=scored(TEACHER),
        V=scored(VALUES),
        v=(scored(VALUES) + torch.randn(sum(sizes), generator=draw)).requires_grad_(),
        v_behav=versions,
        v_prox=1.0,
        v_theta=1.5,
        student=student.requires_grad_(),
        tutor=tutor,
        N=float(sum(sizes)),
    )


@pytest.mark.parametrize("name", names())
def test_an_equation_gives_what_the_code_gives(name: str) -> None:
    kind = algorithm(name, **BITING.get(name, {}))
    samples = list(kind.accept(batch_of(name)))
    assert {s.seq for s in samples} == ({0, 1, 2, 4} if name == "dapo" else {0, 1, 2, 3, 4})
    batch = weighed(kind, samples, oldest=0)
    e = world(kind, samples, batch)
    for line in EQUATIONS[name]:
        setattr(e, KEPT.get(line.term, line.term), RULES[line.text](e))
    checked = {"loss": kind} if kind.critic is None else {"loss": kind, "critic": kind.critic}
    for term, of in checked.items():
        e.at_ends = name == "reward-model"
        loss, _ = of.evaluate(e)
        ours, theirs = getattr(e, term), loss / of.count(batch)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        inputs = (e.logp, e.v, e.student)
        grads = [torch.autograd.grad(x, inputs, retain_graph=True, allow_unused=True) for x in (ours, theirs)]
        assert any(grad is not None and grad.abs().sum() > 0 for grad in grads[0])
        for mine, other in zip(*grads, strict=True):
            zero = torch.zeros(())
            torch.testing.assert_close(
                zero if mine is None else mine, zero if other is None else other, rtol=1e-5, atol=1e-6
            )


def test_every_algorithm_has_an_equation_and_its_lines_are_used() -> None:
    assert EQUATIONS.keys() == set(names())
    for name, equation in EQUATIONS.items():
        assert 3 <= len(equation) <= 8, name
        assert {line.text for line in equation} <= RULES.keys()
    assert {line.text for equation in EQUATIONS.values() for line in equation} == RULES.keys()
    said = " ".join(f"{line.term} {line.text} {line.note}" for equation in EQUATIONS.values() for line in equation)
    for symbols in SYMBOLS:
        assert all(symbol in said for symbol in symbols.split(", ")), symbols


@pytest.mark.parametrize("name", names())
def test_a_knob_that_is_set_turns_a_term(name: str) -> None:
    entry = PRESETS[name] if name in PRESETS else OTHERS[name]
    assert set(entry.knobs) <= {knob for line in EQUATIONS[name] for knob in line.knobs}
