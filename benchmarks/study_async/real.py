"""Virtual time against real runs of the demo's deployment, in which nobody is killed.

A run's log gives service times: of each reply, from when a place at the worker was free and its grant was there to its
end; how many places there are; of each version, what the learners took from when its batch was whole; seal's delay from
a group's last end to its completion, and dispatch's from a commit to the grants. What is compared is what these do not
say: who waits for whom, and so when each version comes."""

from __future__ import annotations

import multiprocessing
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from benchmarks.study_async.simulation import Delays, Engines, Policy, Simulation, Trained
from benchmarks.study_async.study import markdown
from millrace.apps.demo.fleet import BROKER, ENGINE, DemoFleet
from millrace.apps.demo.plan import flags
from millrace.apps.demo.run import create_policy, make_empty, make_topics, warm_start
from millrace.consumers.tell.status import StatusWatch
from millrace.infra.config import FILE, load
from millrace.infra.connect import connect
from millrace.infra.log.topics import full_name
from millrace.infra.process.net import free_ports, wait_until
from millrace.schemas import codec
from tests.chaos.arena import write_settings

LIMIT = 0.10
"""how far a simulated time may be from the real one, as a part of it"""
OVER = "over"
"""file of a run that came to its end"""
TOTALS = ("last version", "version 1 to the last", "the same, times drawn")
"""what must agree: with each reply as long as it was, and with its time drawn from those of all"""
Parts = dict[str, tuple[float, float]]
"""(real seconds, virtual seconds) by part"""
PATIENCE_S = 600.0
"""for engines that start, and for a version"""


Logged = tuple[float, dict[str, Any]]
"""(when it was written, in seconds since the epoch; a record)"""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run's log says, in seconds; times count from the start of the first episode."""

    policy: Policy
    places: int
    """episodes that ran at once, at most"""
    replies: dict[tuple[int, int], float]
    """(ticket, number within its group) -> how long it took, its place's change of hands included"""
    whole: list[float]
    """when each version's batch was"""
    commits: list[float]
    delays: Delays

    @property
    def waits(self) -> list[float]:
        """How long the learners waited for each version's batch."""
        return [max(0.0, now - before) for before, now in zip([0.0, *self.commits], self.whole, strict=False)]

    def step(self, version: int, groups: Sequence[object]) -> float:
        """What the learners took, from when the batch was whole and the version before committed."""
        before = self.commits[version - 1] if version else 0.0
        return self.commits[version] - max(before, self.whole[version])


def run(home: Path, eta: int, engines: int, versions: int, batch: int) -> None:
    """The demo in `home` until it has so many versions; what it wrote is left there. Raises ServiceError where nothing
    comes."""
    make_empty(home)
    ports = free_ports(3 + engines)
    values = {**flags(home.absolute(), 0, ports[:4]), "policy.eta": eta, "policy.batch": batch}
    file = write_settings(home, values)
    settings = load(file)
    fleet = DemoFleet(settings, file)
    for port in ports[4:]:
        for role in (ENGINE, "reload"):
            fleet.enlist(f"{role}-{port}", role, {"MILLRACE_ENGINE__URL": f"http://127.0.0.1:{port}"})
    try:
        fleet.up((BROKER,))
        make_topics(settings)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
            child.submit(warm_start, home, 0).result()
            child.submit(create_policy, settings).result()
        with connect(settings) as bus:
            watch = StatusWatch(bus, settings.namespace, settings.policy.name)

            def has(serving: int, version: int) -> bool:
                watch.poll(0.5)
                states = [one["state"] for one in watch.workers.values() if one["role"] == "engine"]
                return states.count("serving") >= serving and watch.version >= version

            fleet.up([name for name in fleet.names if not name.startswith("rollout")])
            wait_until(lambda: has(engines, 0), "the engines", PATIENCE_S)
            fleet.up()
            for version in range(1, versions + 1):
                wait_until(partial(has, 0, version), f"version {version}", PATIENCE_S)
            watch.close()
        (home / OVER).touch()
    finally:
        fleet.down()


def read(home: Path) -> dict[str, list[Logged]]:
    """Every record of a demo that is over, by topic; its broker runs meanwhile."""
    settings = load(home / FILE)
    fleet = DemoFleet(settings, home / FILE)
    log: dict[str, list[Logged]] = {}
    try:
        fleet.up((BROKER,))
        make_topics(settings)
        with connect(settings) as bus:
            for topic in ("events", "weights", "grants", "completions", "resolutions", "ledger"):
                logical = topic if topic == "events" else f"{settings.policy.name}.{topic}"
                full = full_name(settings.namespace, logical)
                records = [record for p in range(bus.partitions(full)) for record in bus.read(full, p)]
                log[topic] = [(r.timestamp / 1e6, codec.decode(r.value)[1]) for r in records if r.value]
    finally:
        fleet.down()
    return log


def measure(log: dict[str, list[Logged]]) -> Measured:
    """The service times of a run."""
    _, zero = log["weights"][0]
    policy = Policy(zero["batch"], zero["eta"], zero["group_size"])
    starts: dict[str, tuple[float, str]] = {}
    ends: dict[str, float] = {}
    for _, event in log["events"]:
        if event.get("kind") == "episode_started":
            starts[event["attempt"]] = (event["event_time"] / 1e6, event["group"])
        elif event.get("kind") == "episode_ended":
            ends[event["attempt"]] = event["event_time"] / 1e6
    begin = min(start for start, _ in starts.values())
    changes = sorted([(start, 1) for start, _ in starts.values()] + [(end, -1) for end in ends.values()])
    places = max(accumulate(change for _, change in changes))
    complete = {r["group"]: (time, r["ticket"]) for time, r in log["completions"] if r["kind"] == "complete"}
    grants = {grant["ticket"]: time for time, grant in log["grants"]}
    # Places are alike: the nth start after the first ones takes the place that the nth end left. One that waits for a
    # grant is free, and nothing of a reply's.
    free = [begin] * places + sorted(ends.values())
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for left, (attempt, (start, group)) in zip(free, sorted(starts.items(), key=lambda item: item[1]), strict=False):
        if attempt in ends and group in complete:
            since = min(start, max(left, grants[complete[group][1]]))
            groups[group].append((ends[attempt] - since, ends[attempt]))
    seal = [time - max(end for _, end in groups[group]) for group, (time, _) in complete.items()]
    commits = [time - begin for _, time in sorted((entry["version"], time) for time, entry in log["ledger"])]
    whole = [0.0] * (len(commits) - 1)
    for time, resolution in log["resolutions"]:
        if resolution["kind"] == "ready" and resolution["seq"] < len(whole) * policy.batch:
            version = resolution["seq"] // policy.batch
            whole[version] = max(whole[version], time - begin)
    granted = {grant["min_version"]: time - begin for time, grant in sorted(log["grants"], key=_time, reverse=True)}
    turns = [granted[version] - commit for version, commit in enumerate(commits) if version and version in granted]
    replies = {
        (complete[group][1], number): seconds
        for group, samples in groups.items()
        for number, (seconds, _) in enumerate(samples)
    }
    delays = Delays(seal_s=statistics.median(seal), commit_s=statistics.median(turns))
    return Measured(policy, places, replies, whole, commits[1:], delays)


def _time(logged: Logged) -> float:
    return logged[0]


def compare(run: Measured, engines: int = 1) -> Parts:
    """Each part, as it was and as the simulation has it, the places shared evenly by the engines."""
    later = [time for (ticket, _), time in run.replies.items() if ticket >= run.policy.batch]
    middle = statistics.median(run.replies.values())
    fleet = Engines(engines, run.places // engines, token_s=1.0)

    def versions(reply: Callable[[int, int], float]) -> list[Trained]:
        return Simulation(run.policy, fleet, reply, run.step, run.delays).run(len(run.commits))

    replay = versions(lambda ticket, number: run.replies.get((ticket, number), middle))
    draws = versions(lambda *reply: random.Random(repr(reply)).choice(later))
    since = run.commits[-1] - run.commits[0]
    return {
        "first batch": (run.whole[0], replay[0].begin),
        "learners wait": (sum(run.waits[1:]), sum(now.begin - before.end for before, now in pairwise(replay))),
        TOTALS[0]: (run.commits[-1], replay[-1].end),
        TOTALS[1]: (since, replay[-1].end - replay[0].end),
        TOTALS[2]: (since, draws[-1].end - draws[0].end),
    }


def check(home: Path, eta: int, engines: int, versions: int, batch: int) -> Parts:
    """The parts of the run in `home`, which is made unless it is there."""
    one = home / f"eta{eta}-engines{engines}-batch{batch}"
    if not (one / OVER).exists():
        run(one, eta, engines, versions, batch)
    return compare(measure(read(one)), engines)


def agrees(parts: Parts) -> bool:
    """Whether the totals do."""
    return all(abs(virtual / real - 1) <= LIMIT for real, virtual in (parts[name] for name in TOTALS))


def table(rows: Sequence[tuple[int, int, Parts]]) -> str:
    """Real seconds, virtual seconds and their ratio by part, for each (eta, engines, parts)."""
    lines = [[*key, *(f"{a:.1f}, {b:.1f} ({b / a:.3f})" for a, b in parts.values())] for *key, parts in rows]
    return markdown(["eta", "engines", *rows[0][2]], lines)
