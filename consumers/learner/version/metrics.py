"""A committed version as metrics and as one line for people."""

from __future__ import annotations

from millrace.infra import telemetry
from millrace.schemas.records import LedgerEntry
from millrace.trainers.tracking.line import line as numbers

_versions = telemetry.counter("millrace.learner.versions", "{version}", "versions committed")
_tokens = telemetry.counter("millrace.learner.tokens", "{token}", "tokens computed")
_groups = telemetry.counter("millrace.learner.groups", "{group}", "groups consumed, by outcome: trained or lost")
_step = telemetry.histogram("millrace.learner.step.time", "s", "time of a version, by phase")
_staleness = telemetry.histogram("millrace.learner.staleness", "{version}", "versions that trained tokens are behind")
_reward = telemetry.gauge("millrace.learner.reward", "", "mean sampled reward of the newest batch")
_ranks = telemetry.gauge("millrace.learner.ranks", "{rank}", "learners that trained the newest version")
_value = telemetry.gauge("millrace.learner.value", "", "newest value of each measure of the step, by name")


def measure(entry: LedgerEntry) -> None:
    """Record a version's numbers."""
    policy, metrics = entry["policy"], entry["metrics"]
    lost = sum(group["lost"] is not None for group in entry["groups"])
    _versions.add(1, policy=policy)
    _tokens.add(metrics.get("tokens_computed", 0.0), policy=policy)
    _groups.add(lost, policy=policy, outcome="lost")
    _groups.add(len(entry["groups"]) - lost, policy=policy, outcome="trained")
    _staleness.record(metrics.get("staleness_mean", 0.0), policy=policy)
    _reward.set(metrics.get("reward_mean", 0.0), policy=policy)
    _ranks.set(len(entry["ranks"]), policy=policy)
    for name, number in metrics.items():
        if name.startswith("timings_"):
            _step.record(number, policy=policy, phase=name.removeprefix("timings_"))
        else:
            _value.set(number, policy=policy, name=name)


def line(entry: LedgerEntry) -> str:
    """One line of progress for a committed version."""
    m = entry["metrics"]
    parts = [
        f"v{entry['version']}",
        numbers(m),
        f"oldest {m.get('staleness_max', 0.0):.0f} of {entry['eta']} versions",
        f"step {m.get('timings_step', 0.0):.2f} s",
        f"ranks {len(entry['ranks'])}",
    ]
    if m.get("spares"):
        parts.append(f"spares {m['spares']:.0f}")
    lost = sum(group["lost"] is not None for group in entry["groups"])
    if lost:
        parts.append(f"{lost} groups lost")
    if m.get("tokens_pulling", 1.0) == 0:
        parts.append("taught nothing: every advantage is 0, since rewards that are compared are equal")
    if entry["unchanged"]:
        parts.append(f"unchanged: {entry['unchanged']}")
    return "  ".join(parts)
