"""States that cannot train, or not together. Each would end in a wrong number or an error that names no cause."""

from __future__ import annotations

import json

from trainers.errors import BadConfiguration, CheckpointError
from trainers.state import State


def fits(state: State) -> None:
    """Raises CheckpointError when the optimizer's moments are of another model than the weights."""
    if state.adapter is not None:
        return  # its moments are the adapter's, which checks them itself
    for slot, moments in state.moments.items():
        strange = sorted(moments.keys() ^ state.weights.keys())
        strange = strange or sorted(name for name, m in moments.items() if m.shape != state.weights[name].shape)
        if strange:
            raise CheckpointError(
                f"{slot} does not fit the weights at {strange[0]}: state.tensors and model.safetensors must be of one "
                "version; start from the weights alone to begin without moments"
            )


def same_vocabulary(policy: State, other: State, role: str, *, equal: bool) -> None:
    """Raises BadConfiguration when a model that scores beside a policy has a smaller vocabulary, or with `equal`
    another one. Sizes are all that can be compared: that ids mean the same is up to whoever names the model."""
    ours, theirs = (int(json.loads(state.assets["config.json"])["vocab_size"]) for state in (policy, other))
    if theirs < ours or (equal and theirs != ours):
        raise BadConfiguration(f"the {role} knows {theirs} tokens, the policy {ours}: name a {role} of its tokenizer")
