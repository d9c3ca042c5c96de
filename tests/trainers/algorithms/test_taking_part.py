"""Who takes part in advantages: what is masked, and groups that teach nothing, have no influence and no advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.trainers.algorithms.awr import WEIGHT, Awr
from millrace.trainers.algorithms.base import Scores
from millrace.trainers.algorithms.knobs import Knobs
from millrace.trainers.algorithms.normalisation import Norm
from millrace.trainers.algorithms.policy import PolicyGradient
from millrace.trainers.algorithms.presets import PRESETS
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.batches.packing import ADVANTAGES, KEEP, PROXIMAL
from millrace.trainers.batches.sample import Sample
from tests.support.samples import random_samples
from tests.trainers.algorithms.played import together
from tests.trainers.algorithms.weighing import draw_scores

WHITENING = [name for name, preset in PRESETS.items() if "advantage_norm" in preset.knobs]
LEVELS = st.sampled_from([None, "batch", "group"])
NORMS = st.none() | st.builds(
    Norm, mean_level=LEVELS, std_level=LEVELS, std_unbiased=st.booleans(), eps=st.sampled_from([1e-5, 1e-2])
)
LEAVE_ONE_OUT = st.sampled_from([Norm("group", std, mean_leave1out=True) for std in (None, "batch", "group")])
KNOBS = st.fixed_dictionaries(
    {"minibatches": st.just(1)},
    optional={
        "reward_norm": NORMS | LEAVE_ONE_OUT,
        "advantage_norm": NORMS,
        "dynamic_sampling": st.booleans(),
        "discount": st.sampled_from([0.9, 1.0]),
        "kl_coef": st.sampled_from([0.0, 0.5]),
        "reward_scale": st.sampled_from([0.1, 3.0]),
        "overlong_tokens": st.just(0),
    },
)
REJECTIONS = [{"level": level, "metric": "ratio", "upper": 1.5, "lower": 0.7} for level in ("token", "sequence")]


def reply(name: str, reward: float | None, tokens: int, *, cut: bool = False, version: int = 0, seq: int = 0) -> Sample:
    """Two tokens of a prompt and so many of a reply."""
    return Sample(
        tokens=np.ones(2 + tokens, np.int32),
        mask=np.array([0, 0] + [1] * tokens, np.uint8),
        logprobs=np.array([0, 0] + [-1.0] * tokens, np.float32),
        versions=np.array([-1, -1] + [version] * tokens, np.int32),
        reward=reward,
        seq=seq,
        group=f"group-{seq}",
        trajectory=f"{seq}.{name}",
        truncated=cut,
    )


def advantages(kind: PolicyGradient, samples: Sequence[Sample], oldest: int | None = None) -> dict[Sample, float]:
    """Of the samples that are trained at all, each the same at all of its tokens."""
    weights = kind.weigh(kind.accept(samples), oldest, near(samples))
    assert all(len(set(columns[ADVANTAGES].tolist())) == 1 for columns in weights.values())
    return {sample: float(columns[ADVANTAGES][0]) for sample, columns in weights.items()}


def near(samples: Sequence[Sample]) -> Scores:
    """Every model says what the policy that sampled said."""
    behaviour = {s: s.logprobs[s.mask != 0] for s in samples}
    values = {s: np.zeros(s.trainable + 1, np.float32) for s in samples}
    return {"proximal": behaviour, "reference": behaviour, "teacher": behaviour, "values": values}


RIGHT = [reply(f"{i}", 1.0, 8) for i in (0, 1)]
WRONG = [reply(f"{i}", 0.0, 45) for i in (2, 3)]
CUT = [reply(f"{i}", 0.0, 46, cut=True) for i in (4, 5)]


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith(("ppo", "reinforce"))])
def test_running_into_the_limit_is_neither_rewarded_nor_punished(name: str) -> None:
    """Two right and short, two wrong and long, two wrong and cut off."""
    kind = policy(name, mask_truncated=True)
    found = advantages(kind, [*RIGHT, *WRONG, *CUT])
    assert found.keys() == {*RIGHT, *WRONG}
    assert found == advantages(policy(name), [*RIGHT, *WRONG])
    assert all(found[sample] > 0 for sample in RIGHT)
    assert all(found[sample] < 0 for sample in WRONG)


def test_the_numbers_of_a_batch_with_cut_off_replies() -> None:
    """DAPO, tokens 2 x 8 right and 2 x 45 wrong: r is 1/2 and -1/2 over .5774, then whitened over 106 tokens."""
    found = advantages(policy("dapo", mask_truncated=True), [*RIGHT, *WRONG, *CUT])
    tokens = np.repeat([0.5, -0.5], [16, 90]) / (np.sqrt(1 / 3) + 1e-5)
    high, low = ((tokens - tokens.mean()) / (tokens.std(ddof=1) + 1e-5))[[0, -1]]
    assert [round(found[s], 3) for s in (*RIGHT, *WRONG)] == pytest.approx([high, high, low, low], abs=5e-4)
    assert (high, low) == pytest.approx((2.360, -0.420), abs=5e-4)


def test_dynamic_sampling_looks_at_what_is_left() -> None:
    right_and_cut = [
        *RIGHT,
        *CUT,
        *(replace(s, seq=1, group="other", trajectory=f"o{s.trajectory}") for s in (*RIGHT, *WRONG)),
    ]
    assert {s.seq for s in policy("dapo", mask_truncated=True).accept(right_and_cut)} == {1}
    assert {s.seq for s in policy("dapo").accept(right_and_cut)} == {0, 1}


def test_a_cut_off_reply_that_is_bootstrapped_trains_and_is_in_no_mean_of_rewards() -> None:
    norms = {"reward_norm": "group/none", "advantage_norm": "none"}
    kind = policy("ppo", mask_truncated=True, bootstrap_truncated=True, **norms)
    samples = [RIGHT[0], WRONG[0], CUT[0]]
    weights = kind.weigh(kind.accept(samples), None, {"values": {s: np.full(s.trainable + 1, 0.25) for s in samples}})
    assert [float(weights[s][ADVANTAGES][-1]) for s in samples] == [0.5 - 0.25, -0.5 - 0.25, 0.25 - 0.25]


@pytest.mark.parametrize("name", [name for name in WHITENING if not name.startswith(("ppo", "reinforce++"))] + ["grpo"])
@pytest.mark.parametrize("failure", [0.0, 0.3])
def test_a_group_of_failures_pulls_nowhere_beside_one_with_signal(name: str, failure: float) -> None:
    """One group with signal, whose failures are long, beside one where all failed."""
    kind = policy(name, dynamic_sampling=False)
    failures = [reply(f"{i}", failure, 20, seq=1) for i in range(4)]
    failures[0] = replace(failures[0], reward=float(np.nextafter(failure, 1.0)) if failure else 0.0)
    found = advantages(kind, [*RIGHT, *WRONG, *failures])
    assert [found[s] for s in failures] == [0.0] * 4
    assert {s: found[s] for s in (*RIGHT, *WRONG)} == advantages(kind, [*RIGHT, *WRONG])


def test_a_deviation_of_the_batch_is_one_of_the_groups_that_teach() -> None:
    kind = policy("liteppo", advantage_norm="none")
    failures = [reply(f"{i}", 0.0, 20, seq=1) for i in range(4)]
    found = advantages(kind, [*RIGHT, *WRONG, *failures])
    assert [found[s] for s in (*RIGHT, *WRONG)] == pytest.approx(
        [0.5 / (3**-0.5 + 1e-5)] * 2 + [-0.5 / (3**-0.5 + 1e-5)] * 2
    )
    assert [found[s] for s in failures] == [0.0] * 4


def test_what_is_stale_keeps_no_group_in_the_batch() -> None:
    """Dynamic sampling sees rewards before it is known what is stale; what then teaches nothing pulls nowhere."""
    stale = replace(RIGHT[0], versions=np.full(10, -5, np.int32))
    kind = policy("dapo", reward_norm="none")
    weights = kind.weigh(kind.accept([stale, *WRONG, reply("8", 1.0, 4, seq=1), reply("9", 0.0, 6, seq=1)]), 0)
    pulls = {s.trajectory: bool(columns[ADVANTAGES].any()) for s, columns in weights.items()}
    assert pulls == {"0.0": False, "0.2": False, "0.3": False, "1.8": True, "1.9": True}


@pytest.mark.parametrize("name", ["reinforce++", "ppo"])
def test_where_the_batch_or_a_critic_compares_a_group_of_equals_teaches(name: str) -> None:
    found = advantages(policy(name, kl_coef=0.0), [*RIGHT, *(replace(s, seq=1, group="other") for s in WRONG)])
    assert all(value != 0 for value in found.values())


def spoil(samples: list[Sample], how: str, victim: str, scores: dict[str, Any]) -> list[Sample]:
    """One trajectory is masked in one way, or its group's rewards all become equal."""
    seq = next(s.seq for s in samples if s.trajectory == victim)
    out = []
    for s in samples:
        other = s
        if s.trajectory == victim and how == "cut off":
            other = replace(s, truncated=True)
        elif s.trajectory == victim and how == "stale":
            other = replace(s, versions=np.where(s.mask != 0, -5, -1).astype(np.int32))
        elif s.trajectory == victim and how == "without a reward":
            other = replace(s, reward=None)
        elif s.seq == seq and how == "equal":
            other = replace(s, reward=1.0)
        for kind in scores:
            scores[kind][other] = scores[kind][s]
        if s.trajectory == victim and how == "rejected":
            scores[PROXIMAL][s] = (s.logprobs[s.mask != 0] + 3.0).astype(np.float32)
        out.append(other)
    return out


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    how=st.sampled_from(["cut off", "stale", "without a reward", "rejected", "equal"]),
    victim=st.sampled_from([f"{seq}.{index}" for seq in range(3) for index in range(3)]),
    knobs=KNOBS,
    rejection=st.sampled_from(REJECTIONS),
    world=st.integers(1, 3),
)
def test_what_takes_no_part_has_no_influence_and_no_advantage(
    name: str, seed: int, how: str, victim: str, knobs: dict[str, Any], rejection: dict[str, Any], world: int
) -> None:
    """Without it, everybody's advantage is the same, to the last bit; over any number of ranks."""
    if how == "rejected":
        knobs = {**knobs, "decoupled": True, "proximal": "recompute", "rejection": rejection, "objective": "clip"}
        knobs |= {"clip_high": 0.3} if name == "cispo" else {}
    kind = policy(name, **knobs, mask_truncated=True)
    if how == "equal" and not (kind.knobs.compares_in_groups and not kind.knobs.compares_states):
        return
    samples = random_samples(seed, groups=3, group_size=3, version=1)
    scores = {column: dict(rows) for column, rows in draw_scores(samples, seed).items()}
    if how == "rejected":
        scores[PROXIMAL] = {s: s.logprobs[s.mask != 0] for s in samples}
    batch = spoil(samples, how, victim, scores)
    victims = {s for s in batch if s.trajectory == victim or (how == "equal" and f"{s.seq}." == victim[:2])}
    whole = weigh(kind, batch, scores, 1)
    others = weigh(kind, [s for s in batch if s not in victims], scores, 1)
    for sample in victims & whole.keys():
        assert not whole[sample][ADVANTAGES].any()
        assert how in ("rejected", "equal") or not whole[sample][KEEP].any()
    for sample, columns in others.items():
        np.testing.assert_array_equal(whole[sample][ADVANTAGES], columns[ADVANTAGES])
    for sample, columns in weigh(kind, batch, scores, world).items():
        np.testing.assert_allclose(columns[ADVANTAGES], whole[sample][ADVANTAGES], rtol=1e-5, atol=1e-6)


def weigh(kind: PolicyGradient, samples: list[Sample], scores: Scores, world: int) -> dict[Sample, Any]:
    parts = [[s for s in samples if s.seq % world == rank] for rank in range(world)]
    ranks = [lambda reduce, part=part: kind.weigh(kind.accept(part), -1, scores, reduce) for part in parts]
    return {sample: columns for rank in together(ranks) for sample, columns in rank.items()}


def test_a_token_that_is_left_speaks_for_its_reply() -> None:
    """Half of a reply is stale: its reward counts, its stale half gets no advantage."""
    half = replace(RIGHT[0], versions=np.array([-1, -1] + [0] * 4 + [1] * 4, np.int32))
    fresh = [replace(s, versions=s.versions + 2) for s in WRONG]
    found = policy("grpo").weigh([half, *fresh], 1)
    alone = policy("grpo").weigh([half, *fresh], None)
    assert found[half][ADVANTAGES].tolist() == [0.0] * 4 + alone[half][ADVANTAGES].tolist()[4:]
    assert found[fresh[0]][ADVANTAGES].tolist() == alone[fresh[0]][ADVANTAGES].tolist()


def test_the_weights_of_imitation_know_no_stale_reply() -> None:
    stale = replace(RIGHT[0], versions=np.full(10, -5, np.int32))
    every, others = Awr().weigh([stale, *WRONG, RIGHT[1]], 0), Awr().weigh([*WRONG, RIGHT[1]], 0)
    assert not every[stale][KEEP].any()
    for sample, columns in others.items():
        assert every[sample][WEIGHT].tolist() == columns[WEIGHT].tolist()


def test_a_critic_compares_by_itself() -> None:
    assert Knobs(critic=True, reward_norm=Norm("group", None)).compares_states
    assert not Knobs(critic=True, advantage_norm=Norm("group", "group")).compares_in_groups
    assert not Knobs(critic=True, dynamic_sampling=True).compares_states
    assert Knobs(advantage_norm=Norm("group", None)).compares_in_groups
