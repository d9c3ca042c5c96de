"""Virtual time against a real run: the short demo's log gives the service times, the simulation its own total.

Of the log are taken: how long each reply kept a place at the worker (from its episode's start to its end, and the mean
time until a place was used again where a grant was there), how many places there are, what the learners took for each
version from when its batch was whole, seal's delay from a group's last end to its completion, and dispatch's from a
commit to the grants.
What is compared is what these do not say: who waits for whom, and so when each version comes."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.study_async.simulation import Delays, Engines, Policy, Simulation, Trained
from millrace.apps.demo.fleet import BROKER, DemoFleet
from millrace.apps.demo.run import make_topics, run
from millrace.infra.config import FILE, load
from millrace.infra.connect import connect
from millrace.infra.log.topics import full_name
from millrace.schemas import codec

LIMIT = 0.10
"""how far a simulated time may be from the measured one, as a part of it"""


class Logged(NamedTuple):
    """A record and when it was written, in seconds since the epoch."""

    time: float
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run's log says, in seconds; times count from the start of the first episode."""

    policy: Policy
    places: int
    """episodes that ran at once, at most"""
    replies: dict[tuple[int, int], float]
    """(ticket, number within its group) -> from the start of its episode to its end"""
    gap_s: float
    """from an end to the next start at the same place"""
    steps: list[float]
    """what the learners took, by version, from when the batch was whole and the version before committed"""
    commits: list[float]
    delays: Delays


def read(home: Path) -> dict[str, list[Logged]]:
    """Every record of a demo that is over, by topic; its broker runs meanwhile."""
    settings = load(home / FILE)
    fleet = DemoFleet(settings, home / FILE)
    name = settings.policy.name
    topics = {"events": "events", **{one: f"{name}.{one}" for one in ("weights", "grants", "completions")}}
    topics |= {one: f"{name}.{one}" for one in ("resolutions", "ledger")}
    log: dict[str, list[Logged]] = {}
    try:
        fleet.up((BROKER,))
        make_topics(settings)
        with connect(settings) as bus:
            for topic, logical in topics.items():
                full = full_name(settings.namespace, logical)
                records = [record for p in range(bus.partitions(full)) for record in bus.read(full, p)]
                log[topic] = [Logged(r.timestamp / 1e6, codec.decode(r.value)[1]) for r in records if r.value]
    finally:
        fleet.down()
    return log


def measure(log: dict[str, list[Logged]]) -> Measured:
    """The service times of a run."""
    zero = log["weights"][0].record
    policy = Policy(zero["batch"], zero["eta"], zero["group_size"])
    starts: dict[str, tuple[float, str]] = {}
    ends: dict[str, float] = {}
    for _, event in log["events"]:
        if event.get("kind") == "episode_started":
            starts[event["attempt"]] = (event["event_time"] / 1e6, event["group"])
        elif event.get("kind") == "episode_ended":
            ends[event["attempt"]] = event["event_time"] / 1e6
    begin = min(start for start, _ in starts.values())
    groups = defaultdict(list)
    for attempt, (start, group) in sorted(starts.items(), key=lambda item: item[1]):
        if attempt in ends:
            groups[group].append((start, ends[attempt]))
    changes = sorted([(start, 1) for start, _ in starts.values()] + [(end, -1) for end in ends.values()])
    places = max(accumulate(change for _, change in changes))
    complete = {r["group"]: (time, r["ticket"]) for time, r in log["completions"] if r["kind"] == "complete"}
    grants = {grant["ticket"]: time for time, grant in log["grants"]}
    # Places are alike: the nth start after the first ones takes the place that the nth end left. One that waits for a
    # grant is free, and nothing of a reply's.
    later = sorted((start, group) for start, group in starts.values())[places:]
    gap = statistics.fmean(
        start - max(end, grants[complete[group][1]])
        for (start, group), end in zip(later, sorted(ends.values()), strict=False)
        if group in complete
    )
    seal = [time - max(end for _, end in groups[group]) for group, (time, _) in complete.items()]
    whole: dict[int, float] = defaultdict(float)
    for time, resolution in log["resolutions"]:
        if resolution["kind"] == "ready":
            batch = resolution["seq"] // policy.batch
            whole[batch] = max(whole[batch], time - begin)
    commits = [time - begin for time, _ in sorted(log["ledger"], key=lambda item: item.record["version"])]
    granted: dict[int, float] = {}
    for time, grant in log["grants"]:
        granted[grant["min_version"]] = min(granted.get(grant["min_version"], time), time)
    turns = [
        granted[version] - begin - commit for version, commit in enumerate(commits) if version and version in granted
    ]
    return Measured(
        policy,
        places,
        {
            (ticket, number): end - start
            for group, (_, ticket) in complete.items()
            for number, (start, end) in enumerate(groups[group])
        },
        gap,
        [now - max(before, whole[number]) for number, (before, now) in enumerate(pairwise(commits))],
        commits[1:],
        Delays(seal_s=statistics.median(seal), commit_s=statistics.median(turns)),
    )


def simulate(run: Measured, reply: Callable[[int, int], float]) -> list[Trained]:
    """As many versions as the run had."""

    def step(version: int, groups: Sequence[object]) -> float:
        return run.steps[version]

    engines = Engines(1, run.places, token_s=1.0)
    return Simulation(run.policy, engines, reply, step, run.delays).run(len(run.steps))


def compare(run: Measured) -> list[tuple[str, float, float]]:
    """(what, measured seconds, simulated seconds)."""
    later = [time for (ticket, _), time in run.replies.items() if ticket >= run.policy.batch]
    middle = statistics.median(run.replies.values())
    replay = simulate(run, lambda ticket, number: run.replies.get((ticket, number), middle) + run.gap_s)
    draws = simulate(run, lambda *reply: random.Random(repr(reply)).choice(later) + run.gap_s)
    count = len(run.commits)
    whole = f"version {count}, from the first episode on"
    since = f"versions 2 to {count}"
    return [
        (f"{whole}: each reply takes what it took", run.commits[-1], replay[-1].end),
        (f"{since}: each reply takes what it took", run.commits[-1] - run.commits[0], replay[-1].end - replay[0].end),
        (f"{since}: times drawn from those of all", run.commits[-1] - run.commits[0], draws[-1].end - draws[0].end),
    ]


def check(home: Path) -> bool:
    """Compare with the demo in `home`, which is run there first unless it is there; whether all times agree."""
    if not (home / FILE).exists() and run(home, is_short=True):
        raise SystemExit(f"the demo in {home} failed: there is nothing to compare with")
    measured = measure(read(home))
    print(f"{len(measured.replies)} replies, {measured.places} at once, {measured.gap_s:.2f} s between two at a place")
    verdicts = [_agrees(*row) for row in compare(measured)]
    return all(verdicts)


def _agrees(what: str, real_s: float, virtual_s: float) -> bool:
    is_near = abs(virtual_s / real_s - 1) <= LIMIT
    print(
        f"{what}: {real_s:.1f} s, simulated {virtual_s:.1f} s, {virtual_s / real_s:.3f}: {'yes' if is_near else 'NO'}"
    )
    return is_near
