"""Answers of a model in this process to questions, the same ones for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from millrace.trainers.backends.models.build import build
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.offline.text import Encoder
from millrace.trainers.sampling import sample
from millrace.trainers.weights import checkpoint, lora, manifest
from millrace.trainers.weights.model_class import context_length


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """question: which one. finished: whether the model ended it by itself."""

    question: int
    text: str
    finished: bool


def load(directory: Path, digest: str | None = None, device: str | None = None) -> tuple[PreTrainedModel, str | None]:
    """The model in a version's directory or any Hugging Face one, and the digest of a version. Every file of a version
    is checked; CorruptCheckpoint where one is not what its manifest (or `digest`) says."""
    version_digest = None
    if digest is not None or (directory / manifest.NAME).is_file():
        version_digest = manifest.verify(directory, digest).digest
    if (directory / checkpoint.ADAPTER_CONFIG).is_file():
        state = lora.merge(checkpoint.read(directory, verify=False))
    else:
        state = checkpoint.adopt(directory)
    model = build(state.assets, state.tensors)
    torch.nn.Module.to(model, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model.train(False), version_digest


def answer(
    model: PreTrainedModel,
    encoder: Encoder,
    prompts: Sequence[Sequence[int]],
    *,
    n: int,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    at_once: int = 256,
) -> list[ModelAnswer]:
    """n answers to each prompt, in order. temperature 0 takes the likeliest token each time. at_once: answers that are
    sampled together at most, or those of one prompt."""
    if n < 1 or max_tokens < 1 or temperature < 0:
        raise BadConfiguration("samples and max_tokens must be above 0, the temperature not below")
    most = context_length(model.config)
    for index, prompt in enumerate(prompts):
        if len(prompt) + max_tokens > most:
            raise BadConfiguration(
                f"question {index} has {len(prompt)} tokens, with {max_tokens} to answer; the model takes {most}"
            )
    step = max(1, at_once // n)
    answers = []
    for start in range(0, len(prompts), step):
        (word,) = np.random.SeedSequence((seed, start)).generate_state(1)
        replies = sample(
            model,
            prompts[start : start + step],
            n=n,
            max_tokens=max_tokens,
            end=encoder.end,
            generator=torch.Generator(model.device).manual_seed(int(word)) if temperature else None,
            temperature=temperature or 1.0,
        )
        answers += [ModelAnswer(start + r.prompt, encoder.decode(r.tokens), r.finished) for r in replies]
    return answers
