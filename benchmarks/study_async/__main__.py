"""How many engines for a learner, and what asynchrony buys.

    python -m benchmarks.study_async --groups 512 --group-size 16 --generation-s 120 --train-s 190
        answers for your numbers: engines, seconds a version and what bounds it, by eta
    python -m benchmarks.study_async --real runs --eta 0 1 2 4 --engines 1 2
        runs the demo's deployment for real, two to four minutes for each eta and number of engines, with nobody killed
        and no other load but what you put there; reads service times from its log, replays them in virtual time, and
        prints real seconds, virtual seconds and their ratio by part; exits 1 when a total differs by more than 10 %.
        Runs that lie in the directory are read and not run again
    python -m benchmarks.study_async --out runs.jsonl [--plot SVG] [--tables small areal ...]
        the study; points that are in the file are not run again

`--generation-s` is what one reply takes in the mean while its engine has as many as `--concurrency`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.study_async import real
from benchmarks.study_async.rule import bounds, engines_for
from benchmarks.study_async.simulation import Engines, Learners, Lengths, Policy
from benchmarks.study_async.study import ETAS, TABLES, markdown, plot, simulate, study, tables


def answer(arguments: argparse.Namespace) -> str:
    """A row an eta; `simulated` where the loop was run, too."""
    mean, train_s = arguments.generation_s, arguments.train_s
    lengths = Lengths(mean, arguments.sigma, arguments.longest_s or 4 * mean)
    one = Engines(1, arguments.concurrency, token_s=1.0)
    lines: list[list[object]] = []
    synchronous = 0.0
    for eta, wish in product(arguments.eta, arguments.engines or [0]):
        policy = Policy(arguments.groups, eta, arguments.group_size, arguments.release)
        engines = replace(one, count=wish or engines_for(policy, one, lengths, train_s))
        rule = bounds(policy, engines, lengths, train_s)
        synchronous = synchronous or rule.period
        line = [eta, engines.count, f"{rule.period:.0f}", rule.name, f"{arguments.groups / rule.period:.2f}"]
        if arguments.simulate:
            line.append(f"{simulate(policy, engines, lengths, Learners(fixed_s=train_s))['period']:.0f}")
        lines.append([*line, f"{synchronous / rule.period:.2f}"])
    simulated = ["simulated"] if arguments.simulate else []
    gain = f"eta {arguments.eta[0]} = 1"
    return markdown(["eta", "engines", "s a version", "bound by", "groups/s", *simulated, gain], lines)


def main() -> None:
    """What was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    yours = parser.add_argument_group("your numbers")
    yours.add_argument("--groups", type=int, help="B, groups of a batch")
    yours.add_argument("--group-size", type=int, default=8)
    yours.add_argument("--generation-s", type=float, help="of one reply, in the mean")
    yours.add_argument("--longest-s", type=float, help="of a reply at the limit of tokens; else four times the mean")
    yours.add_argument("--train-s", type=float, help="of one version, weights written")
    yours.add_argument("--concurrency", type=int, default=64, help="replies at once in one engine")
    yours.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of a reply's time")
    yours.add_argument("--release", choices=("reserve", "soft"), default="reserve")
    yours.add_argument("--simulate", action="store_true", help="run the loop in virtual time beside the rule")
    parser.add_argument("--eta", type=int, nargs="+", default=list(ETAS))
    parser.add_argument("--engines", type=int, nargs="+", help="else as many as are needed; one with --real")
    checks = parser.add_argument_group("the check and the study")
    checks.add_argument("--real", type=Path, metavar="DIR", help="of the real runs")
    checks.add_argument("--versions", type=int, default=7, help="of each real run")
    checks.add_argument("--batch", type=int, default=48, help="B of real runs")
    checks.add_argument("--out", type=Path, help="one JSON line a point")
    checks.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    checks.add_argument("--plot", type=Path, help="where the pictures go")
    arguments = parser.parse_args()
    if arguments.real:
        rows = [
            (eta, engines, real.check(arguments.real, eta, engines, arguments.versions, arguments.batch))
            for engines, eta in product(arguments.engines or [1], arguments.eta)
        ]
        print(real.table(rows))
        raise SystemExit(not all(real.agrees(parts) for *_, parts in rows))
    if arguments.out:
        rows = study(arguments.out, arguments.tables)
        print("\n\n".join(tables(rows)))
        if arguments.plot:
            plot(rows, arguments.plot)
        return
    if not (arguments.groups and arguments.generation_s and arguments.train_s):
        parser.error("give --groups, --generation-s and --train-s, or --real, or --out")
    print(answer(arguments))


if __name__ == "__main__":
    main()
