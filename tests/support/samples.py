"""Random batches and small models: unequal lengths, several lineages, perturbed norms and biases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.trainers.batches.allocation import ReadyGroup
from millrace.trainers.batches.sample import Sample
from millrace.trainers.weights.state import State

VOCABULARY = 64


def small_state(kind: str = "qwen2", seed: int = 0, **settings: Any) -> State:
    """A random model of about 20k parameters; norms and biases get noise, so that a lost gradient shows."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "dtype": "float32",
            **settings,
        },
    )
    model = AutoModelForCausalLM.from_config(config)
    weights = {}
    for name, parameter in model.named_parameters():
        noisy = "norm" in name or "bias" in name
        weights[name] = parameter.detach() + (0.1 * torch.randn_like(parameter) if noisy else 0.0)
    return State(weights, {"config.json": json.dumps(config.to_dict()).encode()})


def random_samples(
    seed: int,
    *,
    groups: int = 6,
    group_size: int = 4,
    longest: int = 24,
    version: int = 0,
    vocabulary: int = VOCABULARY,
) -> list[Sample]:
    """Whole groups of unequal lengths; some trajectories have two lineages, replies alternate with other text."""
    draw = np.random.default_rng(seed)
    samples = []
    for seq in range(groups):
        for index in range(group_size):
            reward = float(draw.integers(0, 3))
            for lineage in range(1 + int(draw.random() < 0.25)):
                length = int(draw.integers(3, longest + 1))
                mask = (draw.random(length) < 0.6).astype(np.uint8)
                mask[0], mask[-1] = 0, 1
                samples.append(
                    Sample(
                        tokens=draw.integers(0, vocabulary, length).astype(np.int32),
                        mask=mask,
                        logprobs=np.where(mask, -4.5 + draw.normal(0, 0.3, length), 0).astype(np.float32),
                        versions=np.where(mask, version - draw.integers(0, 3, length), -1).astype(np.int32),
                        reward=reward,
                        seq=seq,
                        group=f"group-{seq}",
                        trajectory=f"{seq}.{index}",
                        lineage=lineage,
                    )
                )
    return samples


def groups_of(samples: Sequence[Sample], ranks: int = 1) -> list[ReadyGroup]:
    """What a manifest says of them; rank seq % ranks owns."""
    seqs = sorted({sample.seq for sample in samples})
    return [ReadyGroup(seq, sum(s.length for s in samples if s.seq == seq), seq % ranks) for seq in seqs]
