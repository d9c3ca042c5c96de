"""Copies beside the step: the bytes of the call, whatever is computed before they are made; the order of streams."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.base import Backend
from millrace.trainers.backends.layout import ACTOR, CRITIC
from millrace.trainers.backends.torch import host_copy
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.backends.torch.host_copy import HostCopy
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.adapter import Lora
from tests.support.samples import random_samples, small_state
from tests.support.steps import train_share


@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5))
def test_copies_hold_what_tensors_held_before_they_changed(shapes: list[list[int]]) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    before = [tensor.clone() for tensor in tensors]
    copy = HostCopy(tensors)
    copy.guard()
    for tensor in tensors:
        tensor.add_(1)
    copy.wait()
    for made, wanted in zip(copy.copies, before, strict=True):
        assert torch.equal(made, wanted)


class LateCopies:
    """Threads that copy at the last moment that they may: when `guard` is called."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._due: list[tuple[Future[None], host_copy.Pairs]] = []
        self.guarded = 0
        guard = HostCopy.guard

        def run_first(copy: HostCopy) -> None:
            self.guarded += len(self._due)
            self.run()
            guard(copy)

        patch.setattr(host_copy, "_by_thread", self._begin)
        patch.setattr(HostCopy, "guard", run_first)

    def _begin(self, pairs: host_copy.Pairs) -> Future[None]:
        future: Future[None] = Future()
        self._due.append((future, pairs))
        return future

    def run(self) -> None:
        """Makes all copies that are due."""
        for future, pairs in self._due:
            for copy, tensor in pairs:
                copy.copy_(tensor)
            future.set_result(None)
        self._due.clear()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"compute": Compute(bf16=True)},
    "optimizer in main memory": {"compute": Compute(bf16=True, optimizer_offload=True)},
    "offload": {"offload": (ACTOR, CRITIC)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["grpo", "ppo", "lora"])
def test_a_step_before_the_copies_are_made_changes_no_byte(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, case: str, kind: str
) -> None:
    backend = TorchBackend(device="cpu", **CASES[case])
    backend.form(0, 1, None, 30.0)
    adapter = Lora(4, 8, ("q_proj", "v_proj"), "merged") if kind == "lora" else None
    trainer = Trainer(backend, policy("ppo" if kind == "ppo" else "grpo"), Schedule(1e-3), budget=200, lora=adapter)
    state = small_state()
    if adapter is not None:
        state = checkpoint.adopt(checkpoint.write(tmp_path, 0, state).path)
    trainer.load(state)
    train_share(trainer, random_samples(0), 0, 1, 0)
    wanted = Backend.begin_gather(backend)
    assert wanted is not None
    late = LateCopies(monkeypatch)
    finish = backend.begin_gather()
    train_share(trainer, random_samples(1), 0, 1, 1)
    assert late.guarded == (2 if kind == "ppo" else 1), "each model's copies"
    late.run()
    assert finish is not None
    assert checkpoint.fingerprint(finish()) == checkpoint.fingerprint(wanted())
    backend.tear_down()


def test_a_state_outlives_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 30.0)
    backend.load(small_state())
    wanted = backend.gather()
    late = LateCopies(monkeypatch)
    finish = backend.begin_gather()
    backend.tear_down()
    late.run()
    assert finish is not None
    assert wanted is not None
    assert checkpoint.fingerprint(finish()) == checkpoint.fingerprint(wanted)


class OnCard(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def test_the_computing_stream_waits_for_the_copies_and_they_for_what_was_computed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The order of calls alone: no stream here does anything. What cannot be pinned is said and copied all the same."""
    calls: list[str] = []

    class FakeStream:
        def __init__(self, name: object) -> None:
            self.name = "compute" if name == "compute" else "copies"

        def wait_stream(self, other: FakeStream) -> None:
            calls.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: FakeEvent) -> None:
            calls.append(f"{self.name} waits for event of {event.stream}")

    class FakeEvent:
        stream = ""

        def record(self, stream: FakeStream) -> None:
            self.stream = stream.name
            calls.append(f"{self.stream} records")

        def synchronize(self) -> None:
            calls.append("host waits")

    @contextmanager
    def inside(stream: FakeStream) -> Iterator[None]:
        calls.append(f"copies go to {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream("compute"))
    host_copy._say_pageable.cache_clear()
    with caplog.at_level(logging.WARNING, "millrace.host_copy"):
        copy = HostCopy([torch.arange(3.0).as_subclass(OnCard), torch.ones(2).as_subclass(OnCard)])
    copy.guard()
    copy.wait()
    assert calls == [
        "copies waits for compute",
        "copies go to copies",
        "copies records",
        "compute waits for event of copies",
        "host waits",
    ]
    assert copy.copies[0].tolist() == [0.0, 1.0, 2.0]
    assert caplog.text.count("no more memory can be pinned") == 1, "once, not for each of hundreds of tensors"
