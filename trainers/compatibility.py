"""States that cannot train, or not together, and algorithms that learn nothing from how they are fed. Each would end in
a wrong number or an error that names no cause."""

from __future__ import annotations

import json

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.policy import PolicyGradient
from millrace.trainers.batches.packing import REWARD_MODEL
from millrace.trainers.errors import BadConfiguration, CheckpointError
from millrace.trainers.weights.model_class import is_scalar, read_config, vocabulary_of
from millrace.trainers.weights.state import State


def fits(state: State) -> None:
    """Raises CheckpointError when the optimizer's moments are of another model than the weights."""
    if state.adapter is not None:
        return  # its moments are the adapter's, which checks them itself
    for slot, moments in state.moments.items():
        misfits = sorted(moments.keys() ^ state.weights.keys())
        misfits = misfits or sorted(name for name, m in moments.items() if m.shape != state.weights[name].shape)
        if misfits:
            raise CheckpointError(
                f"{slot} does not fit the weights at {misfits[0]}: state.tensors and model.safetensors must be of one "
                "version; start from the weights alone to begin without moments"
            )


def right_head(state: State, role: str) -> None:
    """Raises BadConfiguration when a model that is held has a vocabulary where scores are asked of it, or scores where
    log-probabilities are."""
    scalar = is_scalar(json.loads(state.assets["config.json"]))
    if scalar and role != REWARD_MODEL:
        raise BadConfiguration(f"the {role} has a score instead of a vocabulary: name a causal model")
    if not scalar and role == REWARD_MODEL:
        raise BadConfiguration("the reward model has a vocabulary and no score: `millrace reward-model` trains one")


def same_vocabulary(policy: State, peer: State, role: str, *, equal: bool) -> None:
    """Raises BadConfiguration when a model that scores beside a policy has a smaller vocabulary, or with `equal`
    another one. Sizes are all that can be compared: that ids mean the same is up to whoever names the model."""
    policy_size, other_size = (
        vocabulary_of(read_config(json.loads(state.assets["config.json"]))) for state in (policy, peer)
    )
    if other_size < policy_size or (equal and other_size != policy_size):
        raise BadConfiguration(
            f"the {role} knows {other_size} tokens, the policy {policy_size}: name a {role} of its tokenizer"
        )


def suits(algorithm: Algorithm, group_size: int, reply_tokens: int | None = None) -> None:
    """Raises BadConfiguration when groups of so many samples, or replies of at most so many tokens (None: not known),
    are not what `algorithm` compares."""
    if algorithm.whole and group_size != 2:
        raise BadConfiguration(f"{algorithm.name} learns from pairs: set [policy] group_size = 2, not {group_size}")
    if not isinstance(algorithm, PolicyGradient):
        return
    knobs = algorithm.knobs
    for name in ("reward_norm", "advantage_norm"):
        norm = getattr(knobs, name)
        if group_size == 1 and norm is not None and norm.mean_level == "group":
            raise BadConfiguration(
                f"{name} takes the mean of groups, which erases what a group of one earns: set [policy] group_size "
                f'above 1, or {name} = "batch/batch"'
            )
    if group_size == 1 and knobs.dynamic_sampling:
        raise BadConfiguration("dynamic_sampling leaves out groups of equals, so every one: set [policy] group_size")
    if knobs.overlong_tokens and reply_tokens is not None and reply_tokens != knobs.max_new_tokens:
        raise BadConfiguration(
            f"the penalty on overlong replies goes by max_new_tokens = {knobs.max_new_tokens}, and replies end at "
            f"[rollout] sampling max_tokens = {reply_tokens}: make them equal"
        )
