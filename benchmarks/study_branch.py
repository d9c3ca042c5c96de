"""What a branch learns from the history of another policy: `python -m benchmarks.study_branch [--seeds 0 1 2]`.

The sort task, in one process, over the log in memory. A real learner trains a tiny model (228,384 parameters) online:
each version samples the next batch, 32 prompts x 8 replies, and GRPO learns from it. Then branches begin at version 0
and learn from the first half of that history, no engine running:

    sft    imitates the best of each group, 4 epochs
    awr    imitates all of a group, the better ones more, 1 epoch
    grpo   offline, token weights truncated at 2, 1 epoch

Reported: mean sampled reward on the same 256 held-out prompts, by seed. Claim: the branch by sft beats the version that
it begins with; exits 1 where it does not. `--out FILE` keeps one JSON line a seed, and skips those that are there."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from millrace.apps.demo import tiny
from tests.support.branches import accuracy, branch, events, play
from tests.support.learners import Place

SIZE = 8
METHODS: dict[str, dict[str, Any]] = {
    "sft": {"lr": 3e-4, "epochs": 4},
    "awr": {"lr": 3e-4, "epochs": 1},
    "grpo": {"lr": 3e-4, "epochs": 1},
}
"""method -> options of the branch"""
COLUMNS = ("start", "online half", "online whole", *METHODS)


def run(folder: Path, seed: int, versions: int, groups: int) -> dict[str, Any]:
    """One history and its branches: accuracy of each, and the reach that the guard found for grpo."""
    model = folder / "model"
    tiny.make_sort_policy(model, seed, target=0.2)
    flags = {"policy.group_size": SIZE, "policy.batch": groups, "learner.lr": 3e-4, "learner.keep": versions + 1}
    place = Place(folder / "run", model=model, **flags)
    try:
        rewards = []
        for version in range(versions):
            newest = Path(events(place.bus, place.settings, "pico")[version]["uri"])
            tickets = range(version * groups, (version + 1) * groups)
            draw = 1000 * (seed + 1) + version
            rewards.append(play(place.bus, place.settings, newest, tickets, size=SIZE, seed=draw, version=version))
            place.learn(version + 1)
        online = [Path(event["uri"]) for event in events(place.bus, place.settings, "pico")]
        half = versions // 2
        found = {"start": online[0], "online half": online[half], "online whole": online[-1]}
        out: dict[str, Any] = {name: accuracy(path) for name, path in found.items()}
        for method, options in METHODS.items():
            last, heard = branch(
                place.bus,
                place.settings,
                method,
                lambda selector: selector.by_rule(lambda trajectory: trajectory["v_tail"] < half),
                method=method,
                version=0,
                batch=groups,
                save_every=1 << 20,
                **options,
            )
            out[method] = accuracy(Path(last["uri"]))
            if heard.reach is not None:
                out["reach"] = [heard.reach.sequence_ess, heard.reach.token_ess]
        return {"seed": seed, "versions": versions, "groups": groups, **out, "rewards": rewards}
    finally:
        place.bus.close()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: a row a seed, and the means."""
    lines = [f"| seed | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    lines += [f"| {row['seed']} | {' | '.join(f'{row[name]:.3f}' for name in COLUMNS)} |" for row in rows]
    means = (statistics.fmean(row[name] for row in rows) for name in COLUMNS)
    return "\n".join([*lines, f"| mean | {' | '.join(f'{mean:.3f}' for mean in means)} |"])


def main() -> int:
    """Runs what is missing, prints the table, then the claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    kept = (
        [json.loads(line) for line in chosen.out.read_text().splitlines()] if chosen.out and chosen.out.exists() else []
    )
    by_key = {(row["seed"], row["versions"], row["groups"]): row for row in kept}
    rows = []
    for seed in chosen.seeds:
        row = by_key.get((seed, chosen.versions, chosen.groups))
        if row is None:
            with tempfile.TemporaryDirectory() as folder:
                row = run(Path(folder), seed, chosen.versions, chosen.groups)
            if chosen.out:
                with chosen.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"seed {seed} is done", file=sys.stderr, flush=True)
        rows.append(row)
    print(table(rows))
    short = [row["seed"] for row in rows if row["sft"] <= row["start"]]
    print(f"claim: sft beats the version that it begins with: {'yes' if not short else f'NO: seeds {short}'}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
