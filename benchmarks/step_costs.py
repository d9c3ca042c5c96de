"""What steps of training cost, for benchmarks that compare two ways to compute the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen2Config, Qwen2ForCausalLM

from millrace.trainers.batches.sample import Sample
from millrace.trainers.weights.state import State

VOCABULARY = 512


def model_state(longest: int) -> State:
    """A random Qwen2 of about two million parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return State(weights, {"config.json": config.to_json_string(use_diff=False).encode()})


def sample_of(asked: NDArray[np.int64], answer: NDArray[np.int64], reward: float, seq: int, index: int) -> Sample:
    """A prompt and its reply."""
    tokens = np.concatenate([asked, answer]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(asked)
    return Sample(
        tokens=tokens,
        mask=mask.astype(np.uint8),
        logprobs=np.where(mask, -6.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=reward,
        seq=seq,
        group=str(seq),
        trajectory=f"{seq}.{index}",
    )


def kept(step: Callable[[], object]) -> int:
    """Bytes that the forward pass of a step of one micro-batch keeps for its backward pass, each storage once."""
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return sum(storages.values())


def medians(ways: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of a call of each, the median of `rounds` in turns, after one that is not counted."""
    seen: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for way, seconds in zip(ways, seen, strict=True):
            begin = time.perf_counter()
            way()
            if number:
                seconds.append(time.perf_counter() - begin)
    return [statistics.median(seconds) for seconds in seen]
