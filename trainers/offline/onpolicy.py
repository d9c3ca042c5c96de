"""A student that answers the prompts itself, for distillation on what it would say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.sample import Sample
from millrace.trainers.offline.data import OfflineItem
from millrace.trainers.sampling import sample


class Student:
    """Answers with the weights as they are. The draws of a step depend on the seed and the step alone."""

    def __init__(
        self,
        backend: TorchBackend,
        items: Sequence[OfflineItem],
        end: int,
        max_tokens: int,
        temperature: float,
        seed: int,
    ) -> None:
        self._backend = backend
        self._items = items
        self._end = end
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._seed = seed

    def answer(self, step: int, indexes: Sequence[int]) -> list[Sample]:
        """One reply to each of the chosen prompts. Step -1: what is held out, drawn alike each time."""
        model = self._backend.model
        prompts = [[int(token) for token in self._items[index].readings[0].tokens] for index in indexes]
        (word,) = np.random.SeedSequence((self._seed, 2, step + 1)).generate_state(1)
        replies = sample(
            model,
            prompts,
            max_tokens=self._max_tokens,
            end=self._end,
            generator=torch.Generator(model.device).manual_seed(int(word)),
            temperature=self._temperature,
        )
        return [
            Sample(
                tokens=np.array([*prompts[r.prompt], *r.tokens], np.int32),
                mask=np.array([0] * len(prompts[r.prompt]) + [1] * len(r.tokens), np.uint8),
                logprobs=np.array([0.0] * len(prompts[r.prompt]) + r.logprobs, np.float32),
                versions=np.array([-1] * len(prompts[r.prompt]) + [max(step, 0)] * len(r.tokens), np.int32),
                reward=None,
                seq=r.prompt,
                group=str(r.prompt),
                trajectory=f"{step}.{r.prompt}",
                truncated=not r.finished,
            )
            for r in replies
        ]
