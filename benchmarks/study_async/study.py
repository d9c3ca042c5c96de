"""The study's tables: each point is simulated once and kept as one JSON line, so that a run can be resumed."""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.study_async import records, regimes
from benchmarks.study_async.optimum import optimum
from benchmarks.study_async.regimes import RATES, REGIMES, cluster
from benchmarks.study_async.rule import bounds, by_hand, engines_for, longest
from benchmarks.study_async.simulation import Delays, Engines, Learners, Lengths, Policy, Simulation, period
from benchmarks.study_async.simulation import staleness as oldest
from millrace.infra.log.base import Bus, Outgoing
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.topics import TopicSizes, full_name
from millrace.infra.machine.broker import Broker
from millrace.infra.stages.live import StageRunner
from millrace.infra.stages.slot import RunnerSettings
from millrace.schemas import codec

Row = dict[str, Any]
Point = tuple[Row, Callable[[], Row]]
"""what tells it from others, and what gives its figures"""
ETAS = (0, 1, 2, 4, 8)
ENGINES = (1, 4, 16, 64, 256, 1024)
RANKS = (1, 2, 4, 8, 16, 32, 64)
DISPATCH = Delays(grant_s=0.0005, resolve_s=0.0005, seal_s=0.1, commit_s=0.1)
"""a thousand groups a second, and tenths of seconds between roles, as measured in the loop"""

QUIET_S = 1.0
"""without a record for so long, everything is folded; not counted"""


def step_of(policy: Policy, lengths: Lengths, learners: Learners) -> float:
    """Seconds of a step whose work is dealt evenly."""
    return learners.evenly(policy.batch * policy.group_size * longest(lengths, 1))


def simulate(
    policy: Policy,
    engines: Engines,
    lengths: Lengths,
    learners: Learners,
    delays: Delays | None = None,
    versions: int = 0,
    warm: int = 0,
) -> Row:
    """Seconds a version once the pipeline is full, the oldest token trained, and what the rule says."""
    run = Simulation(policy, engines, lengths, learners.seconds, delays).run(versions or 10 + 2 * policy.eta)
    rule = bounds(policy, engines, lengths, step_of(policy, lengths, learners))
    figures = {"period": round(period(run, warm or 4 + policy.eta), 3), "oldest": oldest(run)}
    return figures | {"engines": engines.count, "rule": round(rule.period, 3), "bound": rule.name}


def small() -> Iterator[Point]:
    """Steps that are short beside the longest reply."""
    for release, step_s, eta in product(("soft", "reserve"), (2, 10), ETAS):
        parts = Policy(8, eta, 1, release), *regimes.SMALL, Learners(fixed_s=step_s)
        yield {"release": release, "step_s": step_s, "eta": eta}, partial(simulate, *parts, versions=200, warm=20)


def areal() -> Iterator[Point]:
    """AReaL's regimes."""
    for regime, release, eta in product(REGIMES, ("reserve", "soft"), ETAS):
        policy = Policy(regimes.BATCH // regimes.SCALE, eta, regimes.GROUP_SIZE, release)
        yield {"model": regime.name, "release": release, "eta": eta}, partial(simulate, policy, *regime.parts())


def best() -> Iterator[Point]:
    """Production against the exhaustive optimum."""
    for slots, eta in product((2, 3), (0, 1, 2, 4)):
        yield {"versions": 4, "batch": 2, "slots": slots, "eta": eta}, partial(_ratios, 4, 2, slots, eta)


def _ratios(versions: int, batch: int, slots: int, eta: int, instances: int = 20) -> Row:
    chance = random.Random(repr((versions, batch, slots)))
    ratios: list[list[float]] = [[], []]
    for _ in range(instances):
        times = [round(Lengths(5, 1, 27, chance.randrange(1 << 30))(n, 0)) for n in range(versions * batch)]
        step_s = chance.choice((1, 3, 6))
        real = finish(times, slots, batch, step_s, eta)
        for ratio, in_line in zip(ratios, (True, False), strict=True):
            ratio.append(real / optimum(times, slots, batch, step_s, eta, in_line_order=in_line))
    in_line, in_any = ([round(statistics.fmean(ratio), 3), round(max(ratio), 3)] for ratio in ratios)
    return {"in_line": in_line, "in_any_order": in_any}


def finish(times: Sequence[int], slots: int, batch: int, step_s: int, eta: int, release: str = "reserve") -> float:
    """Seconds that production's order takes for an instance of the optimum."""
    parts = Policy(batch, eta, 1, release), Engines(1, slots, 1.0), lambda ticket, sample: times[ticket]
    return Simulation(*parts, lambda *_: step_s, prompts=len(times)).run(len(times) // batch)[-1].end


def engines_table() -> Iterator[Point]:
    """One to 1,024 engines before eight ranks."""
    for eta, count in product(ETAS, ENGINES):
        yield {"eta": eta, "engines": count}, partial(simulate, Policy(256, eta, 8), *cluster(count, 8), DISPATCH)


def learners_table() -> Iterator[Point]:
    """One to 64 ranks, each with as many engines as the rule says."""
    for eta, ranks in product((2, 8), RANKS):
        policy = Policy(256, eta, 8)
        one, lengths, learners = cluster(1, ranks)
        parts = cluster(engines_for(policy, one, lengths, step_of(policy, lengths, learners)), ranks)
        yield {"eta": eta, "ranks": ranks}, partial(simulate, policy, *parts, DISPATCH)


def grid() -> Iterator[Point]:
    """The rule against the simulation."""
    sizes = product((0.4, 1.0), (0.0, 0.004), (5, 20, 80), (0, 1, 4), (1, 4, 16))
    for values in sizes:
        key = dict(zip(("sigma", "crowd_s", "step_s", "eta", "engines"), values, strict=True))
        yield key, partial(simulate, *grid_parts(key), Learners(fixed_s=key["step_s"]))


def grid_parts(key: Row) -> tuple[Policy, Engines, Lengths]:
    """What a row of the grid is about."""
    return Policy(32, key["eta"], 8), Engines(key["engines"], 32, 0.1, key["crowd_s"]), Lengths(100, key["sigma"], 1000)


def rates() -> Iterator[Point]:
    """Groups a second of dispatch."""
    for batch, eta in ((64, 1), (512, 1), (512, 4), (512, 8), (2048, 4)):
        yield {"over": "memory", "batch": batch, "eta": eta}, partial(_memory_rate, batch, eta)
    yield {"over": "broker", "batch": 512, "eta": 4}, partial(_broker_rate, 512, 4)


def groups_per_second(
    bus: Bus, clock: Callable[[], float], batch: int, eta: int, rounds: int = 3, size: int = 16
) -> float:
    """What one dispatch process orders, with the production runner: state, turns, changelog and transactions as in
    production. A round grants B groups of `size`, completes them all and commits the version, so each costs its prompt,
    grant, completion, release and its part of a ledger entry. Only the runner's steps are timed, in seconds of
    `clock`, and not who writes its input."""
    layout = TopicSizes(f"rate{batch}x{eta}", records.POLICY, slots=1, shards=1)
    bus.ensure_topics(layout.specs())
    runner = StageRunner(bus, records.dispatcher(), RunnerSettings(layout.namespace))
    publisher = bus.publisher()
    shuffle, seconds = random.Random(0), 0.0

    def send(topic: str, schema: str, record: object) -> None:
        full = full_name(layout.namespace, topic)
        publisher.publish(Outgoing(full, b"k", codec.encode_by_name(schema, record)))

    def drain() -> float:
        publisher.flush(60)
        last = time.perf_counter()
        begin = end = clock()
        while time.perf_counter() - last < QUIET_S:
            if runner.step(0.05):
                last, end = time.perf_counter(), clock()
        return end - begin

    try:
        send(*records.version_zero(batch, eta, size))
        for number in range((eta + 1) * batch):
            send(*records.prompt(number))
        send(*records.completion(None, [], -1, -1, 0.0))
        drain()
        for version in range(rounds):
            tickets = list(range(version * batch, (version + 1) * batch))
            for ticket in tickets:
                send(*records.prompt((eta + 1) * batch + ticket))
            for ticket in shuffle.sample(tickets, batch):
                send(*records.completion(ticket, [1000] * size, version, version, version + 1.0))
            seconds += drain()
            send(*records.commit(version + 1, (version + 1) * batch))
            seconds += drain()
    finally:
        runner.close()
        publisher.close()
    topic = full_name(layout.namespace, f"{records.POLICY}.resolutions")
    ready = sum(record.headers["kind"] == b"ready" for record in bus.read(topic, 0))
    assert ready == rounds * batch, f"{ready} of {rounds * batch} groups have a seq"
    return rounds * batch / seconds


def _memory_rate(batch: int, eta: int) -> Row:
    """In CPU time, so that load beside it does not count."""
    return {"groups_per_second": round(groups_per_second(MemoryBus(), time.process_time, batch, eta))}


def _broker_rate(batch: int, eta: int) -> Row:
    """By the wall, over a broker of its own, as `millrace up` starts one."""
    with tempfile.TemporaryDirectory() as directory, Broker(Path(directory) / "broker") as server:
        server.start()
        with KafkaBus(server.bootstrap) as bus:
            return {"groups_per_second": round(groups_per_second(bus, time.perf_counter, batch, eta))}


TABLES: dict[str, Callable[[], Iterator[Point]]] = {
    "small": small,
    "areal": areal,
    "optimum": best,
    "engines": engines_table,
    "learners": learners_table,
    "rule": grid,
    "rate": rates,
}


def study(path: Path, names: Sequence[str]) -> list[Row]:
    """The rows of these tables, in order; those that `path` lacks are run, and added to it."""
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = []
    for name, (key, figures) in [(table, point) for table in names for point in TABLES[table]()]:
        row = next((row for row in known if row["table"] == name and row.items() >= key.items()), None)
        if row is None:
            row = {"table": name, **key, **figures()}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
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

    def gains(table: str, **key: object) -> list[str]:
        """How much faster than with eta 0, and in brackets the oldest token."""
        found = select(rows, table, **key)
        return [f"{found[0]['period'] / row['period']:.2f} ({row['oldest']})" for row in found]

    shapes: dict[str, tuple[list[str], list[list[Any]]]] = {
        "small": (
            ["release", "step, s", *by_eta],
            [[r["release"], r["step_s"], *gains("small", release=r["release"], step_s=r["step_s"])]
             for r in select(rows, "small", eta=0)],
        ),
        "areal": (
            ["model", "release", "eta 0, s", *by_eta],
            [[r["model"], r["release"], f"{r['period']:.0f}", *gains("areal", model=r["model"], release=r["release"])]
             for r in select(rows, "areal", eta=0)]
            + [["1.5B", "published", f"{regimes.STEP_TOKENS / RATES[0] / 1000:.0f}",
                *(f"{RATES[eta] / RATES[0]:.2f}" if eta in RATES else "" for eta in ETAS)]],
        ),
        "optimum": (
            ["versions x B, slots", "eta", "in the order of the prompts: mean, worst", "in any order: mean, worst"],
            [[f"{r['versions']} x {r['batch']}, {r['slots']}", r["eta"],
              *("{:.3f}, {:.3f}".format(*r[key]) for key in ("in_line", "in_any_order"))]
             for r in select(rows, "optimum")],
        ),
        "engines": (
            ["engines", *by_eta],
            [[n, *(f"{r['period']:.1f}, {r['bound']}" for r in select(rows, "engines", engines=n))] for n in ENGINES],
        ),
        "learners": (
            ["eta", "ranks", "engines", "s a version", "by the rule", "bound", "groups/s", "of linear"],
            [[r["eta"], r["ranks"], r["engines"], f"{r['period']:.1f}", f"{r['rule']:.1f}", r["bound"],
              f"{256 / r['period']:.1f}", f"{one['period'] / r['period'] / r['ranks']:.2f}"]
             for one in select(rows, "learners", ranks=1) for r in select(rows, "learners", eta=one["eta"])],
        ),
        "rate": (
            ["dispatch over", "B", "eta", "groups a second"],
            [[r["over"], r["batch"], r["eta"], r["groups_per_second"]] for r in select(rows, "rate")],
        ),
    }  # fmt: skip
    yield from (markdown(*shape) for name, shape in shapes.items() if select(rows, name))
    found = select(rows, "rule")
    ratios = {
        "the rule": [row["rule"] / row["period"] for row in found],
        "the rule by hand": [
            by_hand(*grid_parts(row), row["step_s"]) / row["period"] for row in found if not row["crowd_s"]
        ],
    }
    for name, errors in ((name, sorted(abs(ratio - 1) for ratio in all_)) for name, all_ in ratios.items() if all_):
        middle, most = errors[len(errors) // 2], errors[len(errors) * 9 // 10]
        yield f"{name}, {len(errors)} points: off by {middle:.1%} (median), {most:.1%} (nine in ten), {errors[-1]:.1%}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """How busy eight learners are, by engines, and beside it (`-more`) speed-up by eta, groups a second by learners,
    and the rule beside the simulation."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "millrace"
    from matplotlib import pyplot

    def line(axes: Any, found: Sequence[Row], x: str, y: Callable[[Row], float], label: object, shape: str) -> None:
        axes.plot([row[x] for row in found], [y(row) for row in found], shape, label=label)

    def save(figure: Any, file: Path) -> None:
        for axes in figure.axes:
            axes.legend(fontsize="small")
        figure.savefig(file, metadata={"Date": None})

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    policy, (one, lengths, learners) = Policy(256, 0, 8), cluster(1, 8)
    step_s = step_of(policy, lengths, learners)
    for number, eta in enumerate(ETAS):
        line(axes, select(rows, "engines", eta=eta), "engines", lambda r: step_s / r["period"], f"eta {eta}", "o-")
        enough = engines_for(replace(policy, eta=eta), one, lengths, step_s)
        axes.axvline(enough, color=f"C{number}", linestyle=":", linewidth=1)
    axes.set(
        xscale="log",
        xlabel="engines (dotted: as many as the command names)",
        ylabel="part of the time that learners train",
    )
    save(figure, path)

    figure, (by_eta, by_ranks, beside) = pyplot.subplots(1, 3, figsize=(14, 4.5), layout="constrained")
    for regime in REGIMES:
        found = select(rows, "areal", model=regime.name, release="reserve")
        line(by_eta, found, "eta", lambda r, first=found[:1]: first[0]["period"] / r["period"], regime.name, "o-")
    etas = [eta for eta in RATES if eta in ETAS]
    by_eta.plot(etas, [RATES[eta] / RATES[0] for eta in etas], "kx", label="1.5B, published")
    by_eta.set(xlabel="eta", ylabel="versions an hour, eta 0 = 1", title="AReaL's regimes, release reserve")
    for found in (select(rows, "learners", eta=eta) for eta in (2, 8)):
        line(by_ranks, found, "ranks", lambda r: 256 / r["period"], f"eta {found[0]['eta']}", "o-")
        line(by_ranks, found, "ranks", lambda r, one=found[0]: r["ranks"] * 256 / one["period"], None, "k:")
    by_ranks.set(xscale="log", yscale="log", xlabel="ranks, engines by the rule", ylabel="groups a second")
    for table in ("rule", "areal", "engines", "learners"):
        found = [row for row in select(rows, table) if row.get("release", "reserve") == "reserve"]
        line(beside, found, "period", lambda r: r["rule"], table, ".")
    beside.plot([3, 4000], [3, 4000], "k:", linewidth=1)
    beside.set(xscale="log", yscale="log", xlabel="seconds a version, simulated", ylabel="by the rule")
    save(figure, path.with_stem(f"{path.stem}-more"))
