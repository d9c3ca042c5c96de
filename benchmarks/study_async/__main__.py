"""How many engines for a learner, and what asynchrony buys.

    python -m benchmarks.study_async --groups 512 --group-size 16 --generation-s 120 --train-s 190
        answers for your numbers: engines, seconds a version and what bounds it, by eta
    python -m benchmarks.study_async --check [--home DIR]
        virtual time against a real run of the short demo; exits 1 when a time differs by more than 10 %
    python -m benchmarks.study_async --out runs.jsonl [--plot SVG] [--tables small areal ...]
        the study; points that are in the file are not run again

`--generation-s` is what one reply takes in the mean while its engine has as many as `--concurrency`."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.study_async.demo import check
from benchmarks.study_async.rule import bounds, engines_for
from benchmarks.study_async.simulation import Engines, Lengths, Policy, Simulation, period
from benchmarks.study_async.study import ETAS, TABLES, constant, markdown, plot, study, tables


def answer(arguments: argparse.Namespace) -> str:
    """A row an eta; `simulated` where the loop was run, too."""
    mean = arguments.generation_s
    lengths = Lengths(mean, arguments.sigma, arguments.longest_s or 4 * mean)
    one = Engines(1, arguments.concurrency, token_s=1.0)
    lines: list[list[object]] = []
    synchronous = 0.0
    for eta in ETAS:
        policy = Policy(arguments.groups, eta, arguments.group_size, arguments.release)
        count = arguments.engines or engines_for(policy, one, lengths, arguments.train_s)
        engines = replace(one, count=count)
        rule = bounds(policy, engines, lengths, arguments.train_s)
        synchronous = synchronous or rule.period
        line = [eta, count, f"{rule.period:.0f}", rule.name, f"{arguments.groups / rule.period:.2f}"]
        if arguments.simulate:
            versions = Simulation(policy, engines, lengths, constant(arguments.train_s)).run(10 + 2 * eta)
            line.append(f"{period(versions, 4 + eta):.0f}")
        lines.append([*line, f"{synchronous / rule.period:.2f}"])
    simulated = ["simulated"] if arguments.simulate else []
    return markdown(["eta", "engines", "s a version", "bound by", "groups/s", *simulated, "eta 0 = 1"], lines)


def main() -> None:
    """What was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, help="B, groups of a batch")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--generation-s", type=float, help="of one reply, in the mean")
    parser.add_argument("--longest-s", type=float, help="of a reply at the limit of tokens; else four times the mean")
    parser.add_argument("--train-s", type=float, help="of one version, weights written")
    parser.add_argument("--concurrency", type=int, default=64, help="replies at once in one engine")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of a reply's time")
    parser.add_argument("--release", choices=("reserve", "soft"), default="reserve")
    parser.add_argument("--engines", type=int, help="so many, and not as many as are needed")
    parser.add_argument("--simulate", action="store_true", help="run the loop in virtual time beside the rule")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--home", type=Path, help="of a short demo that is over, or is run there")
    parser.add_argument("--out", type=Path, help="one JSON line a point")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    arguments = parser.parse_args()
    if arguments.check:
        with tempfile.TemporaryDirectory() as directory:
            raise SystemExit(0 if check(arguments.home or Path(directory) / "demo") else 1)
    if arguments.out:
        rows = study(arguments.out, arguments.tables)
        print("\n\n".join(tables(rows)))
        if arguments.plot:
            plot(rows, arguments.plot)
        return
    if not (arguments.groups and arguments.generation_s and arguments.train_s):
        parser.error("give --groups, --generation-s and --train-s, or --check, or --out")
    print(answer(arguments))


if __name__ == "__main__":
    main()
