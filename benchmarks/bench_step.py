"""Where a learner's step goes: `python -m benchmarks.bench_step [--ranks 1 2] [--steps 20]`.

One step is what a learner does between fetching bytes and committing: decode the trajectories of its groups (Avro),
train (two minibatches of GRPO on the sort-digits model, 64 groups of 8), gather the state on rank 0, save it durably.
Waiting for data and the Kafka transaction are not in it. The ratio is the share of the step's wall time on rank 0 that
is neither forward, backward, optimizer nor collectives; `train` counts `Trainer.train` alone, `step` the whole."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore

from millrace.apps.demo import sort_digits, tiny
from millrace.schemas import arrays, codec
from millrace.schemas.ids import new_id
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.allocation import ReadyGroup, plan
from millrace.trainers.batches.sample import samples_of
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.weights import checkpoint
from tests.support import forked

GROUPS, SIZE, WARM = 64, 8, 3
COUNTED = ("forward", "backward", "optimizer", "collectives")


def record(seq: int, index: int, digits: str, draw: np.random.Generator) -> bytes:
    """A sealed trajectory of one turn, as it lies on the topic."""
    prompt = tiny.encode(digits)
    reply = [*draw.integers(3, 13, sort_digits.DIGITS).tolist(), tiny.EOS]
    masked, new = len(prompt), len(reply)
    lineage = {
        "id": new_id(),
        "tokens": arrays.pack([*prompt, *reply], "int32"),
        "mask": arrays.pack([0] * masked + [1] * new, "uint8"),
        "logprobs": arrays.pack([0.0] * masked + (-draw.random(new)).tolist(), "float32"),
        "versions": arrays.pack([-1] * masked + [0] * new, "int32"),
        "calls": [new_id()],
    }
    nothing: dict[str, Any] = {"rewards": [], "missing": [], "excluded": [], "events": []}
    names = {"policy": "sort", "tenant": "t", "attempt": new_id(), "task_id": "t", "split": "train"}
    return codec.encode(
        "Trajectory",
        nothing
        | names
        | {"id": new_id(), "group": str(seq), "ticket": seq, "sample": index, "status": "completed"}
        | {"reward": float(draw.random() < 0.4), "lineages": [lineage], "v_head": 0, "v_tail": 0}
        | {"tokens": new, "length": masked + new, "sealed_at": 0},
    )


def learn(rank: int, world: int, port: int, steps: int, out: Any) -> None:
    """One rank; rank 0 puts seconds by phase, one dict a step."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    source = sort_digits.prompts(0)
    records = {seq: [record(seq, i, next(source), draw) for i in range(SIZE)] for seq in range(GROUPS)}
    planned = plan([ReadyGroup(seq, SIZE * 16, seq % world) for seq in records], world, 2)
    minibatches = [[seq for share in minibatch for seq in share] for minibatch in planned]
    mine = [seq for minibatch in planned for seq in minibatch[rank]]
    backend = TorchBackend(device="cpu")
    backend.form(rank, world, TCPStore("127.0.0.1", port) if world > 1 else None, 60.0)
    backend.load(tiny.random_state(0))
    trainer = Trainer(backend, policy("grpo"), Schedule(3e-4))
    clock = backend.clock
    with tempfile.TemporaryDirectory() as root:
        for version in range(WARM + steps):
            clock.drain()
            with clock.phase("decode"):
                decoded = [(seq, codec.decode_as("Trajectory", data)) for seq in mine for data in records[seq]]
                samples = [sample for seq, one in decoded for sample in samples_of(one, seq)]
            seconds = clock.drain()
            report = trainer.train(samples, minibatches=minibatches, version=version)
            seconds |= {n[8:]: s for n, s in report.metrics.items() if n.startswith("timings_") and n != "timings_step"}
            with clock.phase("gather"):
                state = backend.gather()
            if state is not None:
                with clock.phase("save"):
                    checkpoint.write(Path(root), version, state)
            for name, more in clock.drain().items():
                seconds[name] = seconds.get(name, 0.0) + more
            if rank == 0 and version >= WARM:
                out.put(seconds)
    backend.tear_down()


def measure(world: int, steps: int) -> dict[str, float]:
    """Median seconds by phase on rank 0."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forked.server()
    out = context.Queue()
    processes = [context.Process(target=learn, args=(rank, world, store.port, steps, out)) for rank in range(world)]
    for process in processes:
        process.start()
    seen = defaultdict(list)
    for _ in range(steps):
        for name, seconds in out.get(timeout=300).items():
            seen[name].append(seconds)
    for process in processes:
        process.join()
    return {name: statistics.median(values) for name, values in seen.items()}


def main() -> None:
    """Prints one row a number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    columns = ("decode", "other", *COUNTED, "gather", "save")
    print("ranks", *(f"{name:>11}" for name in columns), "   step ms  train ratio  step ratio")
    for world in chosen.ranks:
        ms = {name: 1e3 * seconds for name, seconds in measure(world, chosen.steps).items()}
        step = sum(ms.values())
        useful = sum(ms.get(name, 0.0) for name in COUNTED)
        train = ms["other"] / (ms["other"] + useful)
        row = " ".join(f"{ms.get(name, 0.0):11.2f}" for name in columns)
        print(f"{world:5} {row} {step:10.1f} {train:12.3f} {1 - useful / step:11.3f}")


if __name__ == "__main__":
    main()
