"""Learners in any number train the same thing: `python -m benchmarks.study_layouts [--versions 30]`.

A local broker, one recorded `trajectories` topic, a tiny model (228,384 parameters) and learner processes as
`millrace learn` runs them. From version 0 the same batches are trained by 1, 2 and 3 learners, each twice, and by
learners that come and go (1, 2, 3, then 2, changed while batches keep coming). Claims; exits 1 when one does not hold:

    bytes    the same layout twice gives the same bytes, version by version
    step     a step from the same state differs between layouts by rounding: all steps of the single learner done again
             by 2 and 3 ranks; all steps of the others done again by one (by as many ranks as the run: same bytes)
    shares   every ledger entry lists as many ranks as trained, each with samples and tokens, together the whole batch
    joins    the first version committed after a joiner was agreed upon has a share of its

`drift` is reported: how far the last weights are from the single learner's, and as a part of the way that those came.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.layout_runs import BATCH, SIZE, Join, Layout, Outcome, Recording, record, train
from benchmarks.layout_steps import apart, compare
from millrace.infra.machine.broker import Broker
from millrace.trainers.weights import checkpoint
from tests.support.ranks import Ranks

TOLERANCES = {"loss": 1.5e-6, "grad_norm": 5e-7, "weights": 5e-5}
"""of one step between layouts: absolute loss, relative gradient norm, absolute weight"""
CHANGING = "1>2>3>2"
LEAST = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. limit: None where nothing is claimed."""

    claim: str
    what: str
    figure: float
    limit: float | None
    holds: bool = True

    def __str__(self) -> str:
        limit = "" if self.limit is None else f"{self.limit:.3g}"
        ratio = "" if not self.limit else f"{self.figure / self.limit:.3f}"
        said = "" if self.limit is None else "yes" if self.holds else "NO"
        return f"{self.claim:7} {self.what:54} {self.figure:10.3g} {limit:>9} {ratio:>7}  {said}"


def faulty_shares(rows: Iterable[Mapping[str, Any]], samples: int) -> list[int]:
    """Versions whose entry does not list a share with samples and tokens for each rank, `samples` in all."""
    return [
        row["version"]
        for row in rows
        if row["layout"] != f"torch:d{len(row['ranks'])}"
        or [share["rank"] for share in row["ranks"]] != list(range(len(row["ranks"])))
        or not all(share["samples"] > 0 and share["tokens"] > 0 for share in row["ranks"])
        or sum(share["samples"] for share in row["ranks"]) != samples
        or sum(share["tokens"] for share in row["ranks"]) != row["metrics"]["tokens_computed"]
    ]


def share_of(row: Mapping[str, Any], join: Join) -> int:
    """Tokens that a joiner computed of a version."""
    return sum(share["tokens"] for share in row["ranks"] if join.mark in share["member"])


def first_after(rows: Iterable[Mapping[str, Any]], at: float) -> Mapping[str, Any] | None:
    """The first version that was written after `at`, seconds since the epoch."""
    return next((row for row in rows if row["time"] > at * 1e6), None)


def without(rows: Iterable[Mapping[str, Any]], join: Join) -> int:
    """Versions between a joiner's wish to join and its first share: what the others did before they met it."""
    since = [row for row in rows if row["time"] > join.asked * 1e6]
    return next((index for index, row in enumerate(since) if share_of(row, join)), len(since))


def bytes_rows(one: Outcome, other: Outcome) -> list[Row]:
    """Claim `bytes` of two runs."""
    same = sum(a["digest"] == b["digest"] for a, b in zip(one.rows[1:], other.rows[1:], strict=True))
    most = len(one.rows) - 1
    return [Row("bytes", f"versions with equal bytes, {one.name} and {other.name}", same, most, same == most)]


def ledger_rows(run: Outcome) -> list[Row]:
    """Claims `shares` and `joins` of one run."""
    made = run.rows[1:]
    worlds = {len(row["ranks"]) for row in made}
    wanted = {count for _, count in run.layout}
    right = len(made) - len(faulty_shares(made, BATCH * SIZE))
    moved = sum(row["unchanged"] is None for row in made)
    shown = "+".join(str(sum(len(row["ranks"]) == n for row in made)) for n in sorted(worlds))
    ranks = ", ".join(map(str, sorted(worlds)))
    out = [
        Row(
            "shares", f"{run.name}: entries with all shares ({shown} by {ranks})", right, len(made), right == len(made)
        ),
        Row("shares", f"{run.name}: versions that moved the weights", moved, len(made), moved == len(made)),
    ]
    if not worlds <= wanted or (len(run.layout) > 1 and worlds != wanted):
        out.append(Row("shares", f"{run.name}: numbers of ranks other than wanted", len(worlds ^ wanted), 0, False))
    for join in run.joins:
        row = first_after(made, join.agreed)
        tokens = share_of(row, join) if row is not None else 0
        whole = row["metrics"]["tokens_computed"] if row is not None else 1.0
        named = f"v{row['version']}" if row is not None else "none"
        passed = without(made, join)
        what = f"{run.name}: joiner's part of {named} ({passed} while it joined)"
        out.append(Row("joins", what, tokens / whole, 0, tokens > 0))
    return out


def step_rows(recording: Recording, run: Outcome, world: int, ranks: Ranks, same: bool) -> list[Row]:
    """Claim `step`: a run's steps done again with `world` ranks. same: the bytes must be equal."""
    worst = compare(recording, run, world, ranks)
    named = f"{run.name} redone by {world}"
    most = len(run.rows) - 1
    if same:
        return [Row("step", f"{named}: steps with equal bytes", worst.same, most, worst.same == most)]
    figures = {"loss": worst.loss, "grad_norm": worst.grad_norm, "weights": worst.weights}
    return [
        Row("step", f"{named}: worst {name}", figure, TOLERANCES[name], figure <= TOLERANCES[name])
        for name, figure in figures.items()
    ]


def drift_rows(single: Outcome, run: Outcome) -> list[Row]:
    """`drift` of the last version."""
    most = len(single.rows) - 1
    begin, end, mine = (
        checkpoint.read(one.directory(number)) for one, number in ((single, 0), (single, most), (run, most))
    )
    way = sum(float(((t - begin.weights[n]) ** 2).sum()) for n, t in end.weights.items()) ** 0.5
    off = sum(float(((t - end.weights[n]) ** 2).sum()) for n, t in mine.weights.items()) ** 0.5
    return [
        Row("drift", f"{run.name}: largest weight difference at v{most}", apart(mine, end), None),
        Row("drift", f"{run.name}: distance, as a part of the way from v0", off / way, None),
    ]


def layouts(versions: int) -> dict[str, Layout]:
    """The runs by name."""
    quarter = versions // 4
    changing = [(0, 1), (quarter, 2), (2 * quarter, 3), (3 * quarter, 2)]
    fixed = {f"{n}{again}": [(0, n)] for n in (1, 2, 3) for again in ("", " again")}
    return {**fixed, CHANGING: changing}


def study(folder: Path, bootstrap: str, versions: int) -> list[Row]:
    """All runs, and the table."""
    recording = record(folder, bootstrap, "study", versions)
    before = recording.digest()
    runs = {}
    for name, layout in layouts(versions).items():
        runs[name] = train(recording, name, layout)
        print(f"{name}: {len(runs[name].rows) - 1} versions", file=sys.stderr, flush=True)
    untouched = recording.digest() == before
    single, rows = runs["1"], [Row("bytes", "recorded topics that the runs left as they were", untouched, 1, untouched)]
    for n in "123":
        rows += bytes_rows(runs[n], runs[f"{n} again"])
    with Ranks(3) as ranks:
        for name, world in (("1", 1), ("1", 2), ("1", 3), ("2", 2), ("2", 1), ("3", 3), ("3", 1), (CHANGING, 1)):
            rows += step_rows(recording, runs[name], world, ranks, same=name == str(world))
    for run in runs.values():
        rows += ledger_rows(run)
    for name in ("2", "3", CHANGING):
        rows += drift_rows(single, runs[name])
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows under a header."""
    head = f"{'claim':7} {'what':54} {'figure':>10} {'limit':>9} {'ratio':>7}  holds"
    return "\n".join([head, *map(str, rows)])


def main() -> None:
    """Run the study and print the table; exits 1 when a claim does not hold."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=30)
    arguments = parser.parse_args()
    if arguments.versions < LEAST:
        parser.error(f"fewer than {LEAST} versions may be over before the last learner has come and gone")
    with tempfile.TemporaryDirectory() as name, Broker(Path(name) / "broker") as broker:
        broker.start()
        rows = study(Path(name), broker.bootstrap, arguments.versions)
    print(table(rows))
    sys.exit(0 if all(row.holds for row in rows) else 1)


if __name__ == "__main__":
    main()
