"""A history worth learning from: a tiny model that sorts some digits, its replies judged and sealed in a log in memory,
and branches of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.apps.demo import sort_digits, tiny
from millrace.consumers import policy_names
from millrace.consumers.audit import audit
from millrace.consumers.learner.group.identity import Identity
from millrace.consumers.learner.version.records import Machine
from millrace.consumers.replay.branch.guard import Reach
from millrace.consumers.replay.branch.items import BranchItems
from millrace.consumers.replay.branch.job import BranchOptions
from millrace.consumers.replay.branch.records import BranchChoice, ledger_entry, weight_event
from millrace.consumers.replay.branch.run import Brancher, BranchObserver
from millrace.consumers.replay.selection import Question
from millrace.infra.config import Settings
from millrace.infra.log.base import Bus, Outgoing
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history import newest
from millrace.schemas import codec
from millrace.schemas.arrays import pack
from millrace.schemas.records import WeightVersion
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.sampling import SampledReply, sample
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.checkpoint import Checkpoint
from tests.support.feed import feed


def backend_of(directory: Path) -> TorchBackend:
    """A formed backend with the weights of a directory. Tear it down."""
    backend = TorchBackend(Adam(), device="cpu")
    backend.form(0, 1, None, 60.0)
    backend.load(checkpoint.adopt(directory))
    return backend


def accuracy(directory: Path, count: int = 256) -> float:
    """Mean reward on held-out tasks, one sampled reply each."""
    digits = list(islice(sort_digits.prompts(7, evaluation=True), count))
    backend = backend_of(directory)
    try:
        return tiny.accuracy(backend, digits, torch.Generator().manual_seed(1))
    finally:
        backend.tear_down()


def play(
    bus: Bus, settings: Settings, model: Path, groups: range, *, size: int, seed: int = 0, version: int = 0
) -> float:
    """Replies of the model, which is this version, to tasks, judged and written as ready groups, `size` samples
    each; gives their mean reward."""
    digits = list(islice(sort_digits.prompts(seed), len(groups)))
    backend = backend_of(model)
    try:
        prompts = [tiny.encode(text) for text in digits]
        draw = torch.Generator().manual_seed(seed)
        replies = sample(backend.model, prompts, n=size, max_tokens=tiny.REPLY, end=tiny.EOS, generator=draw)
    finally:
        backend.tear_down()
    by_group: dict[int, list[SampledReply]] = {}
    for reply in replies:
        by_group.setdefault(reply.prompt, []).append(reply)

    earned: list[float] = []

    def change(trajectory: dict[str, Any]) -> None:
        at = trajectory["ticket"] - groups.start
        reply = by_group[at][trajectory["sample"]]
        prompt = prompts[at]
        mask = np.array([0] * len(prompt) + [1] * len(reply.tokens), np.uint8)
        trajectory["lineages"][0] |= {
            "tokens": pack(np.array([*prompt, *reply.tokens], np.int32)),
            "mask": pack(mask),
            "logprobs": pack(np.array([0.0] * len(prompt) + reply.logprobs, np.float32)),
            "versions": pack(np.where(mask, version, -1).astype(np.int32)),
        }
        earned.append(tiny.reward(digits[at], reply))
        trajectory |= {"tokens": len(reply.tokens), "length": len(mask), "reward": earned[-1]}

    feed(bus, settings, groups, version=version, change=change)
    return math.fsum(earned) / len(earned)


class Heard(BranchObserver):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.left_out: dict[str, int] = {}
        self.items = 0
        self.reach: Reach | None = None
        self.steps: list[int] = []
        self.versions: list[Checkpoint] = []
        self.went_on: list[int] = []

    def on_selection(self, candidates: int, made: BranchItems, left_out: Any) -> None:
        self.left_out, self.items = dict(left_out), len(made.items)

    def on_reach(self, reach: Reach) -> None:
        self.reach = reach

    def on_resume(self, version: int) -> None:
        self.went_on.append(version)

    def on_step(self, step: int, metrics: Any) -> None:
        self.steps.append(step)

    def on_version(self, written: Checkpoint) -> None:
        self.versions.append(written)


def everything(selector: Any) -> Any:
    """The question that wants all."""
    return selector.by_rule(lambda _: True)


def branch(
    bus: Bus,
    settings: Settings,
    name: str = "b",
    question: Question = everything,
    heard: Heard | None = None,
    **more: Any,
) -> tuple[WeightVersion, Heard]:
    """Make or go on with a branch; its last event and what was heard."""
    heard = heard or Heard()
    options = BranchOptions(name, **{"lr": 1e-3, "batch": 16, "device": "cpu", **more})
    event = Brancher(settings, bus, ClaimStore(settings.claims)).run(options, question, observer=heard)
    return event, heard


def train_on(bus: Bus, settings: Settings, noise: float = 0.0) -> WeightVersion:
    """The policy's next version, as a learner would leave it: other weights, and in the log. noise: how far each weight
    is moved at random besides, in standard deviations of its tensor."""
    names, root = policy_names.topics(settings), policy_names.weights_root(settings)
    head = newest.head(bus, names["weights"], names["ledger"])
    assert head is not None
    state = checkpoint.read(Path(head.weights["uri"]), digest=head.weights["digest"])
    draw = torch.Generator().manual_seed(0)
    moved = {
        name: weight * 1.01 + (noise * weight.std() * torch.randn(weight.shape, generator=draw) if noise else 0.0)
        for name, weight in sorted(state.weights.items())
    }
    written = checkpoint.write(root, head.version + 1, replace(state, weights=moved))
    event = weight_event(head, written, BranchChoice("", "", 0, None, None), 1, head.weights["time"] + 1)
    event |= dict.fromkeys(("selection", "selection_digest", "selection_places"))
    identity = Identity("", "", {}, "", "", {})
    entry = ledger_entry(head, event, [], {}, "learner", identity, Machine("cpu", 1), 0)
    with bus.transactor(policy_names.transactional_id(settings)) as transactor:
        transactor.begin()
        transactor.send(Outgoing(names["weights"], b"w", codec.encode("WeightVersion", event)))
        transactor.send(Outgoing(names["ledger"], b"l", codec.encode("LedgerEntry", entry)))
        transactor.commit({}, None)
    return event


def events(bus: Bus, settings: Settings, name: str = "b") -> list[WeightVersion]:
    """Every weight event of a branch."""
    names = policy_names.topics(BranchOptions(name).settings(settings))
    head = newest.head(bus, names["weights"], names["ledger"])
    found: Iterable[Any] = range(head.version + 1 if head else 0)
    heads = [newest.older(bus, names["weights"], names["ledger"], number) for number in found]
    return [one.weights for one in heads if one is not None]


def violations(bus: Bus, settings: Settings, name: str = "b") -> list[str]:
    """What the audit of a branch finds."""
    report = audit(bus, settings.namespace, name, files=True)
    return [violation.message for violation in report.violations]
