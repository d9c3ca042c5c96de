"""How stale samples may be, and which repair helps: `python -m benchmarks.study_staleness --out FILE [--plot SVG]`.

The sort task in one process, without the loop: a tiny model (228,384 parameters), warmed up once a seed by SFT, then a
fixed number of samples (steps x 32 prompts x 8 replies), each batch sampled from the weights of `eta` versions before.
All corrections share GRPO's advantages, clip, learning rate and two minibatches a batch:

    naive       no correction: ratios count from the weights as the batch begins, as if they had sampled it
    coupled     PPO's clip around the policy that sampled
    decoupled   clipped around the recomputed proximal policy, weighed by its ratio to the sampling one
    tis         the same with weights of at most 2
    icepop      the same without tokens whose weight is outside 0.5 to 5

Reported: mean sampled reward of the last version on 256 held-out prompts x 4, over the seeds, with a 95 % confidence
interval (Student's t). One JSON line a run goes to `--out`; runs that are there are skipped, so it can be resumed."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

from benchmarks.rl_in_process import rehearse
from millrace.apps.demo import tiny
from millrace.trainers.algorithms.presets import ICEPOP, TIS
from millrace.trainers.algorithms.registry import algorithm
from millrace.trainers.learning import Schedule
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State

CORRECTIONS: dict[str, dict[str, Any]] = {
    "naive": {"recompute": True},
    "coupled": {},
    "decoupled": {"decoupled": True},
    "tis": {"decoupled": True, "rejection": TIS},
    "icepop": {"decoupled": True, "rejection": ICEPOP},
}
"""name -> knobs on top of grpo"""
ETAS = (0, 1, 2, 4, 8, 16)
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t, two-sided 95 %, by degrees of freedom"""


def run(start: State, correction: str, eta: int, seed: int, steps: int, groups: int, lr: float) -> dict[str, Any]:
    """One policy trained on samples that are `eta` versions old."""
    chosen = algorithm("grpo", **CORRECTIONS[correction])
    done = rehearse(start, chosen, Schedule(lr, 10), steps=steps, groups=groups, seed=seed, lag=eta)
    return {
        "correction": correction,
        "eta": eta,
        "seed": seed,
        "steps": steps,
        "groups": groups,
        "lr": lr,
        "accuracy": round(done.accuracy, 4),
        "seconds": round(done.generating + done.training, 1),
        "rewards": [round(reward, 4) for reward in done.rewards],
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval (0 for one value)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, T95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: a row a correction, a column an eta."""
    etas = sorted({row["eta"] for row in rows})
    lines = [f"| correction | {' | '.join(f'eta {eta}' for eta in etas)} |", f"| --- |{' --- |' * len(etas)}"]
    for name in (name for name in CORRECTIONS if any(row["correction"] == name for row in rows)):
        cells = []
        for eta in etas:
            found = [row["accuracy"] for row in rows if (row["correction"], row["eta"]) == (name, eta)]
            cells.append("{:.3f} ± {:.3f}".format(*interval(found)) if found else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over eta, a line a correction, with its interval."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "millrace"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name in CORRECTIONS:
        by_eta = {
            eta: [row["accuracy"] for row in rows if (row["correction"], row["eta"]) == (name, eta)]
            for eta in sorted({row["eta"] for row in rows})
        }
        points = [(eta, *interval(values)) for eta, values in by_eta.items() if values]
        if points:
            etas, means, widths = zip(*points, strict=True)
            axes.errorbar(etas, means, yerr=widths, label=name, capsize=3, marker="o", markersize=3)
    axes.set(xlabel="eta: versions that samples are old", ylabel="sampled reward, held-out prompts", ylim=(0, 1))
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(sorted({row["eta"] for row in rows}), [str(eta) for eta in sorted({row["eta"] for row in rows})])
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Runs what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS))
    parser.add_argument("--etas", type=int, nargs="+", default=list(ETAS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--out", type=Path, required=True, help="one JSON line a run")
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in chosen.out.read_text().splitlines()] if chosen.out.exists() else []
    done = {(row["correction"], row["eta"], row["seed"], row["steps"], row["groups"], row["lr"]) for row in rows}
    for seed in chosen.seeds:
        start: State | None = None
        for eta, name in itertools.product(chosen.etas, chosen.corrections):
            if (name, eta, seed, chosen.steps, chosen.groups, chosen.lr) in done:
                continue
            if start is None:
                with tempfile.TemporaryDirectory() as root:
                    tiny.make_sort_policy(Path(root), seed)
                    start = checkpoint.adopt(Path(root))
            rows.append(run(start, name, eta, seed, chosen.steps, chosen.groups, chosen.lr))
            with chosen.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(f"{name} eta {eta} seed {seed}: {rows[-1]['accuracy']:.3f}", file=sys.stderr, flush=True)
    print(table(rows))
    if chosen.plot:
        plot(rows, chosen.plot)


if __name__ == "__main__":
    main()
