"""The other backends against torch: `python -m benchmarks.bench_backends [--steps 5] [--ranks 2]`.

The same random Qwen2 of about two million parameters, the same samples, GRPO, float32, data parallel over gloo, one
thread a rank; each backend in processes of its own. Megatron runs under the tests' shim here, which says nothing about
its kernels on a GPU. Printed: tokens a second of all ranks, the peak memory of a rank above what it held before it
loaded the model, and both as ratios to torch in the same run."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.distributed_c10d import Store

from benchmarks.step_costs import VOCABULARY, model_state, sample_of
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.factory import make_backend
from millrace.trainers.batches.sample import Sample
from millrace.trainers.learning import Schedule, Trainer
from tests.support import megatron_shim
from tests.support.ranks import Ranks, meet
from tests.support.steps import train_share

CONTENDERS: dict[str, dict[str, Any]] = {
    "torch": {},
    "deepspeed zero 1": {"stage": 1},
    "deepspeed zero 2": {"stage": 2},
    "deepspeed zero 3": {"stage": 3},
    "megatron": {},
}
"""row -> options of its backend, which is its first word"""
SIZE, LONGEST = 4, 160


def batch(groups: int) -> list[Sample]:
    """Groups of four replies of unequal length."""
    draw = np.random.default_rng(0)
    samples = []
    for seq in range(groups):
        asked = draw.integers(0, VOCABULARY, 32)
        for index in range(SIZE):
            answer = draw.integers(0, VOCABULARY, int(draw.integers(16, LONGEST - 32)))
            samples.append(sample_of(asked, answer, float(index % 2), seq, index))
    return samples


def _memory(name: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


def measure(_: Any, rank: int, world: int, store: Store, name: str, steps: int, groups: int) -> tuple[float, int]:
    """A job: median seconds of a step, and bytes."""
    backend_name = name.split()[0]
    if backend_name == "megatron":
        megatron_shim.install()
    backend = make_backend(f"{backend_name}:d1", **CONTENDERS[name])
    meet(rank, world, store)
    backend.form(rank, world, store, 120.0)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    trainer = Trainer(backend, policy("grpo", minibatches=1), Schedule(1e-4), budget=2048)
    trainer.load(model_state(LONGEST))
    samples, seconds = batch(groups), []
    for version in range(steps + 1):
        began = time.perf_counter()
        train_share(trainer, samples, backend.data_rank, backend.data_world, version=version)
        seconds.append(time.perf_counter() - began)
    backend.gather()
    peak = _memory("VmHWM") - before
    backend.tear_down()
    return statistics.median(seconds[1:]), peak


def main() -> None:
    """Prints a row a backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--groups", type=int, default=8)
    chosen = parser.parse_args()
    tokens = sum(sample.length for sample in batch(chosen.groups))
    print(f"{tokens} tokens a step, {chosen.ranks} ranks\n{'':17} tokens/s   ratio   peak MB   ratio")
    first: tuple[float, int] | None = None
    for name in CONTENDERS:
        with Ranks(chosen.ranks) as ranks:
            found = ranks.run(measure, chosen.ranks, name, chosen.steps, chosen.groups)
        seconds, peak = max(one[0] for one in found), max(one[1] for one in found)
        first = first or (seconds, peak)
        print(
            f"{name:17} {tokens / seconds:8.0f}  {first[0] / seconds:6.2f}  {peak / 2**20:8.0f}  {peak / first[1]:6.2f}"
        )


if __name__ == "__main__":
    main()
