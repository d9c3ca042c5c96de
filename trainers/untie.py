"""A model with an output matrix of its own, of one that shares it with its input embeddings."""

from __future__ import annotations

import json
from dataclasses import replace

from millrace.trainers.errors import CheckpointError
from millrace.trainers.state import State

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def untied(state: State) -> State:
    """The same model, step for step the same numbers at first; what has a head of its own already is as it was. Raises
    CheckpointError where its input embeddings are not found."""
    settings = json.loads(state.assets["config.json"])
    if HEAD in state.weights and not settings.get("tie_word_embeddings"):
        return state
    names = [name for name in state.weights if name.endswith(EMBEDDING)]
    if len(names) != 1:
        raise CheckpointError(f"{len(names)} of its weights end in {EMBEDDING}: untie this model by its own means")
    settings["tie_word_embeddings"] = False
    assets = {**state.assets, "config.json": (json.dumps(settings, indent=2) + "\n").encode()}
    return replace(state, weights={**state.weights, HEAD: state.weights[names[0]].clone()}, assets=assets, source=None)
