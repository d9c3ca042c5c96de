"""The study's tables: each point is simulated once and kept as one JSON line, so that a run can be resumed."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.study_async import rate
from benchmarks.study_async.optimum import optimum
from benchmarks.study_async.regimes import CLUSTER, RATES, REGIMES, SMALL, STEP_TOKENS, cluster
from benchmarks.study_async.rule import bounds, engines_for, longest
from benchmarks.study_async.simulation import Delays, Engines, Learners, Lengths, Policy, Simulation, Step, period
from benchmarks.study_async.simulation import staleness as oldest

Row = dict[str, Any]
Point = tuple[Row, Callable[[], Row]]
"""what tells it from others, and what gives its figures"""
ETAS = (0, 1, 2, 4, 8)
NOTES = {
    ("soft", 2): (1, 3.40, 5.40, 7.17, 7.17),
    ("soft", 10): (1, 2.19, 2.37, 2.37, 2.37),
    ("reserve", 2): (1, 1.74, 2.36, 3.50, 5.35),
    ("reserve", 10): (1, 1.78, 2.19, 2.37, 2.37),
}
"""speed-ups over eta 0 that the simulation of our notes gave, by release and step, for each of ETAS"""
DISPATCH = Delays(grant_s=0.0005, resolve_s=0.0005, seal_s=0.1, commit_s=0.1)
"""a thousand groups a second, and tenths of seconds between roles, as measured in the loop"""


def run(policy: Policy, engines: Engines, lengths: Lengths, step: Step, delays: Delays | None = None) -> Row:
    """Seconds a version once the pipeline is full, and the oldest token trained."""
    versions = Simulation(policy, engines, lengths, step, delays).run(10 + 2 * policy.eta)
    return {"period": round(period(versions, 4 + policy.eta), 3), "oldest": oldest(versions)}


def constant(seconds: float) -> Step:
    """A step that always takes so long."""

    def step(version: int, groups: Sequence[object]) -> float:
        return seconds

    return step


def small() -> Iterator[Point]:
    """The setting of our notes."""
    for release, step_s, eta in itertools.product(("reserve", "soft"), (2, 10), ETAS):

        def figures(release: str = release, step_s: int = step_s, eta: int = eta) -> Row:
            versions = Simulation(Policy(8, eta, 1, release), *SMALL, constant(step_s)).run(200)
            return {"period": round(period(versions, 20), 3), "oldest": oldest(versions)}

        yield {"release": release, "step_s": step_s, "eta": eta}, figures


def areal() -> Iterator[Point]:
    """AReaL's regimes."""
    for regime, release, eta in itertools.product(REGIMES, ("reserve", "soft"), ETAS):
        if eta or release == "reserve":
            engines, learners, lengths = regime.parts()
            policy = regime.policy(eta, release)
            rule = bounds(policy, engines, lengths, regime.training_s)
            figures = partial(run, policy, engines, lengths, learners.seconds)
            yield {"model": regime.name, "release": release, "eta": eta}, partial(_beside, figures, rule.period)


def best() -> Iterator[Point]:
    """Production against the exhaustive optimum."""
    for versions, batch, slots, eta in ((*size, eta) for size in ((4, 2, 2), (4, 2, 3)) for eta in (0, 1, 2, 4)):
        yield (
            {"versions": versions, "batch": batch, "slots": slots, "eta": eta},
            partial(_ratios, versions, batch, slots, eta),
        )


def _ratios(versions: int, batch: int, slots: int, eta: int, instances: int = 20) -> Row:
    chance = random.Random(repr((versions, batch, slots)))
    ratios = []
    for _ in range(instances):
        times = [round(Lengths(5, 1, 27, chance.randrange(1 << 30))(n, 0)) for n in range(versions * batch)]
        step_s = chance.choice((1, 3, 6))
        real = finish(times, slots, batch, step_s, eta)
        ratios.append(
            [real / optimum(times, slots, batch, step_s, eta, in_line_order=ordered) for ordered in (True, False)]
        )
    line, free = zip(*ratios, strict=True)
    return {
        "in_line": [round(statistics.fmean(line), 3), round(max(line), 3)],
        "in_any_order": [round(statistics.fmean(free), 3), round(max(free), 3)],
    }


def finish(times: Sequence[int], slots: int, batch: int, step_s: int, eta: int, release: str = "reserve") -> float:
    """Seconds that production's order takes for an instance of the optimum."""
    simulation = Simulation(
        Policy(batch, eta, 1, release),
        Engines(1, slots, 1.0),
        lambda ticket, sample: times[ticket],
        constant(step_s),
        prompts=len(times),
    )
    return simulation.run(len(times) // batch)[-1].end


def scale_engines() -> Iterator[Point]:
    """One to 1,024 engines before eight ranks."""
    for eta, count in itertools.product(ETAS, (1, 4, 16, 64, 256, 1024)):
        yield {"eta": eta, "engines": count}, partial(_cluster, Policy(256, eta, 8), count, 8)


def scale_learners() -> Iterator[Point]:
    """One to 64 ranks, each with as many engines as the rule says."""
    for eta, ranks in itertools.product((2, 8), (1, 2, 4, 8, 16, 32, 64)):
        policy = Policy(256, eta, 8)
        engines, learners = cluster(1, ranks)
        lengths = CLUSTER[1]
        count = engines_for(policy, engines, lengths, step_of(policy, learners, lengths))
        yield {"eta": eta, "ranks": ranks}, partial(_cluster, policy, count, ranks)


def step_of(policy: Policy, learners: Learners, lengths: Lengths) -> float:
    """Seconds of a step whose work is dealt evenly."""
    tokens = policy.batch * policy.group_size * longest(lengths, 1)
    reduce_s = learners.reduce_s * learners.minibatches if learners.count > 1 else 0.0
    return learners.fixed_s + tokens * learners.token_s / learners.count + reduce_s


def _cluster(policy: Policy, count: int, ranks: int) -> Row:
    engines, learners = cluster(count, ranks)
    lengths = CLUSTER[1]
    rule = bounds(policy, engines, lengths, step_of(policy, learners, lengths))
    figures = run(policy, engines, lengths, learners.seconds, DISPATCH)
    return figures | {"engines": count, "rule": round(rule.period, 3), "bound": rule.name}


def _beside(figures: Callable[[], Row], rule: float) -> Row:
    return figures() | {"rule": round(rule, 3)}


def error() -> Iterator[Point]:
    """The rule against the simulation over a grid."""
    for sigma, crowd, step_s, eta, count in itertools.product(
        (0.4, 1.0), (0.0, 0.004), (5, 20, 80), (0, 1, 4), (1, 4, 16)
    ):
        policy, engines, lengths = Policy(32, eta, 8), Engines(count, 32, 0.1, crowd), Lengths(100, sigma, 1000)
        rule = bounds(policy, engines, lengths, step_s)
        key = {"sigma": sigma, "crowd_s": crowd, "step_s": step_s, "eta": eta, "engines": count}
        yield key, partial(_beside, partial(run, policy, engines, lengths, constant(step_s)), rule.period)


def rates() -> Iterator[Point]:
    """Groups a second of dispatch."""
    for batch, eta in ((64, 1), (512, 1), (512, 4), (512, 8), (2048, 4)):
        yield {"over": "memory", "batch": batch, "eta": eta}, partial(_rate, batch, eta)
    yield {"over": "broker", "batch": 512, "eta": 4}, _broker_rate


def _rate(batch: int, eta: int) -> Row:
    return {"groups_per_second": round(rate.in_memory(batch, eta))}


def _broker_rate() -> Row:
    with rate.broker() as bootstrap:
        return {"groups_per_second": round(rate.over_broker(bootstrap, 512, 4))}


TABLES: dict[str, Callable[[], Iterator[Point]]] = {
    "small": small,
    "areal": areal,
    "optimum": best,
    "engines": scale_engines,
    "learners": scale_learners,
    "rule": error,
    "rate": rates,
}


def study(path: Path, names: Sequence[str]) -> list[Row]:
    """Run what `path` lacks of these tables, and give all of its rows."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for name in names:
        for key, figures in TABLES[name]():
            if any(row["table"] == name and row.items() >= key.items() for row in rows):
                continue
            rows.append({"table": name, **key, **figures()})
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def select(rows: Sequence[Row], table: str, **key: object) -> list[Row]:
    """The rows of a table that have these values."""
    return [row for row in rows if row["table"] == table and row.items() >= key.items()]


def markdown(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table of a page."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *lines))


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Those that have rows, for the page."""
    by_eta = [f"eta {eta}" for eta in ETAS]

    def speedups(table: str, base: Row, **key: object) -> list[str]:
        cells = []
        for eta in ETAS:
            found = select(rows, table, **key, eta=eta)
            cells.append(f"{base['period'] / found[0]['period']:.2f} ({found[0]['oldest']})" if found else "")
        return cells

    lines: list[Sequence[object]] = []
    for release, step_s in NOTES:
        for base in select(rows, "small", release=release, step_s=step_s, eta=0):
            lines.append([release, step_s, *speedups("small", base, release=release, step_s=step_s)])
            lines.append(["in the notes", step_s, *NOTES[release, step_s]])
    if lines:
        yield markdown(["release", "step, s", *by_eta], lines)
    lines = []
    for regime in REGIMES:
        for base in select(rows, "areal", model=regime.name, eta=0):
            for release in ("reserve", "soft"):
                cells = speedups("areal", base, model=regime.name, release=release)
                lines.append(
                    [
                        regime.name,
                        release,
                        f"{base['period']:.0f}",
                        *(cells if release == "reserve" else ["1", *cells[1:]]),
                    ]
                )
    if lines:
        published = [f"{RATES[eta] / RATES[0]:.2f}" if eta in RATES else "" for eta in ETAS]
        lines.append(["1.5B", "published", f"{STEP_TOKENS / RATES[0] / 1000:.0f}", *published])
        yield markdown(["model", "release", "eta 0, s", *by_eta], lines)
    if found := select(rows, "optimum"):
        yield markdown(
            ["versions x B, slots", "eta", "in the order of the prompts: mean, worst", "in any order: mean, worst"],
            [
                [f"{r['versions']} x {r['batch']}, {r['slots']}", r["eta"]]
                + ["{:.3f}, {:.3f}".format(*r[key]) for key in ("in_line", "in_any_order")]
                for r in found
            ],
        )
    if found := select(rows, "engines"):
        counts = sorted({row["engines"] for row in found})
        yield markdown(
            ["engines", *by_eta],
            [[n] + [f"{r['period']:.1f}, {r['bound']}" for r in found if r["engines"] == n] for n in counts],
        )
    if found := select(rows, "learners"):
        yield markdown(
            ["eta", "ranks", "engines", "s a version", "by the rule", "bound", "groups/s", "of linear"],
            [
                [
                    *(r["eta"], r["ranks"], r["engines"], f"{r['period']:.1f}", f"{r['rule']:.1f}", r["bound"]),
                    *(f"{256 / r['period']:.1f}", f"{one['period'] / r['period'] / r['ranks']:.2f}"),
                ]
                for r in found
                for one in select(rows, "learners", eta=r["eta"], ranks=1)
            ],
        )
    if errors := sorted(abs(row["rule"] / row["period"] - 1) for row in select(rows, "rule")):
        middle, most = errors[len(errors) // 2], errors[len(errors) * 9 // 10]
        yield f"{len(errors)} points: error {middle:.1%} (median), {most:.1%} (nine in ten), {errors[-1]:.1%} (worst)"
    if found := select(rows, "rate"):
        yield markdown(
            ["dispatch over", "B", "eta", "groups a second"],
            [[r["over"], r["batch"], r["eta"], r["groups_per_second"]] for r in found],
        )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Four pictures in one: speed-up by eta, by engines, by learners, and the rule beside the simulation."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "millrace"
    from matplotlib import pyplot

    figure, ((by_eta, by_engines), (by_ranks, beside)) = pyplot.subplots(2, 2, figsize=(10, 8), layout="constrained")
    for regime in REGIMES:
        found = select(rows, "areal", model=regime.name, release="reserve")
        by_eta.plot(
            [r["eta"] for r in found], [found[0]["period"] / r["period"] for r in found], "o-", label=regime.name
        )
    etas = [eta for eta in RATES if eta in ETAS]
    by_eta.plot(etas, [RATES[eta] / RATES[0] for eta in etas], "kx", label="1.5B, published")
    by_eta.set(xlabel="eta", ylabel="versions an hour, eta 0 = 1", title="AReaL's regimes, release reserve")
    for eta in ETAS:
        found = select(rows, "engines", eta=eta)
        by_engines.plot([r["engines"] for r in found], [256 / r["period"] for r in found], "o-", label=f"eta {eta}")
    by_engines.set(xscale="log", yscale="log", xlabel="engines", ylabel="groups a second", title="8 ranks")
    for eta in (2, 8):
        found = select(rows, "learners", eta=eta)
        by_ranks.plot([r["ranks"] for r in found], [256 / r["period"] for r in found], "o-", label=f"eta {eta}")
        by_ranks.plot([1, 64], [256 / found[0]["period"], 64 * 256 / found[0]["period"]], "k:", linewidth=1)
    by_ranks.set(xscale="log", yscale="log", xlabel="ranks, engines by the rule", ylabel="groups a second")
    for table in ("rule", "areal", "engines", "learners"):
        found = [row for row in select(rows, table) if row.get("release", "reserve") == "reserve"]
        beside.plot([r["period"] for r in found], [r["rule"] for r in found], ".", label=table)
    beside.plot([3, 4000], [3, 4000], "k:", linewidth=1)
    beside.set(xscale="log", yscale="log", xlabel="seconds a version, simulated", ylabel="by the rule")
    for axes in (by_eta, by_engines, by_ranks, beside):
        axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})
