"""A training from files, from its job to its last version. `millrace sft`, `dpo`, `reward-model` and `distill` call
`run`, and a Python program may do the same:

    run(Job("sft", model=Path("model"), data=Path("lessons.jsonl"), out=Path("versions")))
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.kto import mismatches
from millrace.trainers.algorithms.registry import algorithm
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.layout import REFERENCE, TEACHER
from millrace.trainers.backends.models.build import with_scalar_head
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.learning import Trainer
from millrace.trainers.offline import items as shapes
from millrace.trainers.offline import rows
from millrace.trainers.offline.items import Data, Make, OfflineItem
from millrace.trainers.offline.job import Job
from millrace.trainers.offline.loop import Batch, RunObserver, RunPace, train
from millrace.trainers.offline.order import ItemOrder
from millrace.trainers.offline.text import Encoder
from millrace.trainers.sampling import sample
from millrace.trainers.schedule import Schedule
from millrace.trainers.tracking.base import Tracker
from millrace.trainers.weights import checkpoint, manifest
from millrace.trainers.weights.checkpoint import Checkpoint, Fault
from millrace.trainers.weights.state import State

SHAPES: Mapping[str, Make] = {
    "sft": shapes.demonstration,
    "dpo": shapes.pair,
    "ipo": shapes.pair,
    "simpo": shapes.pair,
    "orpo": shapes.pair,
    "kto": shapes.demonstration,
    "reward-model": shapes.pair,
    "distill-forward": shapes.demonstration,
    "distill-reverse": shapes.demonstration,
}
"""What each algorithm that learns from files reads."""
WITH_LABEL = ("kto",)
"""Those whose rows have a label too."""


def run(
    job: Job,
    *,
    trackers: Sequence[Tracker] = (),
    observer: RunObserver | None = None,
    fault: Fault = lambda name: None,
) -> Checkpoint:
    """Train as `job` says; gives the last version. Raises TrainerError for what cannot be done."""
    observer = observer or RunObserver()
    learner = _algorithm(job)
    begin = partial(_start, job, learner)
    backend = TorchBackend(
        Adam(weight_decay=job.weight_decay, clip=job.max_grad_norm),
        device=job.device,
        compute=Compute(job.bf16, job.checkpointing),
    )
    backend.form(0, 1, None, 60.0)
    try:
        encoder = Encoder(job.model)
        data = _read(job, begin(), backend, encoder, observer)
        order = ItemOrder(len(data.items), job.batch, job.seed, job.holdout)
        pace = RunPace(job.steps or job.epochs * order.steps, job.evaluate_every, job.save_every, job.keep)
        total = 0 if job.decay == "constant" else pace.steps * learner.minibatches
        schedule = Schedule(job.lr, job.warmup, job.decay, total, job.floor)
        trainer = Trainer(backend, learner, schedule, budget=job.budget, held=_frozen_models(job), lora=job.lora)
        batch: Batch = partial(_samples_of, data.items)
        if job.on_policy:
            student = Student(backend, data.items, encoder.end, job.max_tokens, learner.temperature, job.seed)
            batch = student.answer
        elif job.algorithm in WITH_LABEL:
            batch = partial(_rated_samples, data.items, job.max_length or backend.longest)
        return train(
            trainer,
            backend,
            begin,
            batch,
            order,
            pace,
            job.out,
            about={**_about(job, data), "decays_over": total},
            resume=job.resume,
            trackers=trackers,
            observer=observer,
            fault=fault,
        )
    finally:
        backend.tear_down()


def _algorithm(job: Job) -> Algorithm:
    if job.algorithm not in SHAPES:
        raise BadConfiguration(f"{job.algorithm} does not learn from files: choose {', '.join(SHAPES)}")
    if job.on_policy and not job.algorithm.startswith("distill"):
        raise BadConfiguration(f"{job.algorithm} learns from replies that are given: leave on_policy out")
    if job.lora is not None and job.algorithm == "reward-model":
        raise BadConfiguration("a reward model has a head of its own, which an adapter is not: leave lora out")
    if job.max_tokens < 1 or job.epochs < 1 or job.steps < 0:
        raise BadConfiguration("max_tokens and epochs must be above 0, steps not below")
    learner = algorithm(job.algorithm, **job.knobs)
    if job.reference is not None and REFERENCE not in learner.holds:
        raise BadConfiguration(f"{job.algorithm} compares with no other model: leave reference out")
    return learner


def _frozen_models(job: Job) -> dict[str, Callable[[], State]]:
    places = {REFERENCE: job.reference or job.model, TEACHER: job.teacher}
    return {role: partial(checkpoint.adopt, path) for role, path in places.items() if path is not None}


def _start(job: Job, learner: Algorithm) -> State:
    state = checkpoint.adopt(job.model, seed=job.seed)
    if learner.name != "reward-model":
        return state
    scalar = with_scalar_head(state)
    return replace(scalar, assets={**state.assets, **scalar.assets})


def _read(job: Job, state: State, backend: TorchBackend, encoder: Encoder, observer: RunObserver) -> Data:
    backend.load(state)
    vocabulary, longest = backend.vocabulary, backend.longest
    if job.max_length:
        longest = min(longest, job.max_length)
    if job.on_policy:
        longest -= job.max_tokens
    return shapes.load(
        rows.read(job.data),
        shapes.prompt if job.on_policy else SHAPES[job.algorithm],
        encoder,
        vocabulary=vocabulary,
        longest=longest,
        rate=shapes.label if job.algorithm in WITH_LABEL else lambda row: None,
        strict=job.strict,
        on_reject=observer.on_refusal,
    )


def _samples_of(items: Sequence[OfflineItem], step: int, indexes: Sequence[int]) -> list[Sample]:
    return [sample for seq, index in enumerate(indexes) for sample in items[index].samples(seq)]


def _rated_samples(items: Sequence[OfflineItem], longest: int, step: int, indexes: Sequence[int]) -> list[Sample]:
    """And those that tell how far the policy is from its reference."""
    samples = _samples_of(items, step, indexes)
    return [*samples, *mismatches(samples, longest)]


def _about(job: Job, data: Data) -> dict[str, object]:
    """What must be equal for a run to go on."""
    loose = {"steps", "epochs", "evaluate_every", "save_every", "keep", "resume", "strict", "device"}
    facts = {name: value for name, value in asdict(job).items() if name not in loose}
    for name in ("model", "reference", "teacher"):
        facts[name] = _weights(facts[name]) if facts[name] is not None else None
    facts["knobs"] = dict(sorted(job.knobs.items()))
    return {**facts, "data": data.digest, "out": None}


def _weights(directory: Path) -> str:
    """sha256 hex over the weights and the configuration of a model directory, wherever it lies."""
    out = hashlib.sha256()
    for path in sorted([*directory.glob("*.safetensors"), directory / "config.json"]):
        out.update(f"{path.name} {manifest.file_hash(path)}\n".encode())
    return out.hexdigest()


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
