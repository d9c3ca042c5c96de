"""Every algorithm learns to sort: `python -m benchmarks.study_algorithms [NAMES] [--seeds 0 1 2] [--steps 150]`.

In one process, without the loop: a tiny model (228,384 parameters) is warmed up by SFT once a seed, then each algorithm
trains it from there, 64 prompts x 8 samples a step. Reported: mean sampled reward of the first 3 and the last 10 steps,
their difference, seconds. Claim: each raises it by at least `--bar`; exits 1 when one does not. What learns from data
(dpo, sft ...) is measured in its own way (`objectives.py`) and makes no claim. `--out FILE` keeps one JSON line a run
and skips those that are there already; `--plot DIR` draws a curve an algorithm."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

from benchmarks import objectives
from benchmarks.rl_in_process import rehearse
from millrace.apps.demo import tiny
from millrace.trainers.algorithms.registry import algorithm
from millrace.trainers.learning import Report, Schedule
from millrace.trainers.weights import checkpoint

PROVEN = ("grpo", "ppo", "rloo", "reinforce++", "dapo", "gspo", "cispo")
RATES = {"ppo": 3e-4}
LR, WARMUP, CRITIC_LR = 3e-4, 10, 1e-3


def run(model: Path, name: str, seed: int, steps: int, knobs: dict[str, Any]) -> dict[str, Any]:
    """One algorithm from one warm start."""

    def progress(step: int, report: Report) -> None:
        if step % 25 == 24:
            print(f"  {name} {step + 1}: {report.metrics['reward_mean']:.3f}", file=sys.stderr, flush=True)

    done = rehearse(
        checkpoint.adopt(model),
        algorithm(name, **knobs),
        Schedule(RATES.get(name, LR), WARMUP),
        steps=steps,
        seed=seed,
        critic_lr=CRITIC_LR,
        refill=True,
        progress=progress,
    )
    seconds = done.generating + done.training
    return _row(name, seed, "sampled reward", done.rewards, done.gain(), seconds)


def run_other(model: Path, name: str, seed: int, steps: int) -> dict[str, Any]:
    """One that learns from data."""
    started = time.monotonic()
    values = objectives.curve(name, checkpoint.adopt(model), steps=steps, seed=7 + seed)
    gain = sum(values[-10:]) / len(values[-10:]) - sum(values[:3]) / len(values[:3])
    return _row(name, seed, objectives.MEASURES[name], values, gain, time.monotonic() - started)


def _row(name: str, seed: int, measure: str, values: list[float], gain: float, seconds: float) -> dict[str, Any]:
    return {
        "algorithm": name,
        "seed": seed,
        "steps": len(values),
        "measure": measure,
        "first": sum(values[:3]) / len(values[:3]),
        "last": sum(values[-10:]) / len(values[-10:]),
        "gain": gain,
        "seconds": seconds,
        "curve": [round(value, 4) for value in values],
    }


def plot(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """`<algorithm>.svg` of each: its measure over steps, a line a seed."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "millrace"
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        figure, axes = pyplot.subplots(figsize=(5, 2.6), layout="constrained")
        for row in sorted((row for row in rows if row["algorithm"] == name), key=lambda row: row["seed"]):
            axes.plot(range(1, len(row["curve"]) + 1), row["curve"], label=f"seed {row['seed']}", linewidth=1)
            axes.set(xlabel="step", ylabel=row["measure"].replace("_", " "), title=name)
        axes.set_ylim(0, 1 if "loss" not in axes.get_ylabel() else None)
        axes.legend(fontsize="small")
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def main() -> int:
    """Prints one line a run, then the claims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=PROVEN)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--bar", type=float, default=0.25)
    parser.add_argument("--knobs", type=json.loads, default={}, help="overrides as JSON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="directory for the pictures")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = (
        [json.loads(line) for line in chosen.out.read_text().splitlines()] if chosen.out and chosen.out.exists() else []
    )
    print(f"{'algorithm':22} seed steps  first   last   gain  seconds")
    for seed in chosen.seeds:
        with tempfile.TemporaryDirectory() as root:
            model = Path(root)
            for name in chosen.names:
                key = (name, seed, chosen.steps)
                row = next((r for r in rows if (r["algorithm"], r["seed"], r["steps"]) == key), None)
                if row is None:
                    if not any(model.iterdir()):
                        tiny.make_sort_policy(model, seed)
                    if name in objectives.MEASURES:
                        row = run_other(model, name, seed, chosen.steps)
                    else:
                        row = run(model, name, seed, chosen.steps, chosen.knobs)
                    rows.append(row)
                    if chosen.out:
                        with chosen.out.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                print(
                    f"{name:22} {seed:4} {row['steps']:5}  {row['first']:.3f}  {row['last']:.3f}  {row['gain']:+.3f}"
                    f"  {row['seconds']:7.1f}",
                    flush=True,
                )
    wanted = [r for r in rows if r["algorithm"] in chosen.names and r["seed"] in chosen.seeds]
    claimed = [r for r in wanted if r["algorithm"] not in objectives.MEASURES]
    short = sorted({r["algorithm"] for r in claimed if r["gain"] < chosen.bar})
    if chosen.plot:
        plot(rows, chosen.plot)
    print(f"claim: each gains at least {chosen.bar}: {'yes' if not short else 'NO: ' + ', '.join(short)}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
