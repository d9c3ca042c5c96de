"""What a policy's records come to: rewards, staleness, learners, groups, time and faults as plain values. Pure but for
`read` and `summary`. Trajectories and events are not among the records: the audit reads those.

Invariants: versions are those beyond 0, in order; ages are versions between a token and the version that it trained;
shares are of tokens computed; of what policies share, only what is about this one or about none is read."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean

import numpy as np

from millrace.consumers.tell.faults import LearnerChange, QuietStages, changes, silences
from millrace.infra.log.base import Bus
from millrace.infra.log.history.kinds import (
    DEAD_LETTERS,
    DECISIONS,
    GRANTS,
    LEDGER,
    RESOLUTIONS,
    SCORES,
    WEIGHTS,
    WORKERS,
    Kind,
    R,
)
from millrace.infra.log.history.reader import History, left_out
from millrace.infra.log.history.rows import Resolve, as_stored
from millrace.infra.log.topics import stages_of, turns_of
from millrace.infra.workers import DRAIN
from millrace.schemas.ids import now_micros
from millrace.schemas.records import (
    DeadLetter,
    Decision,
    Evaluation,
    Grant,
    LedgerEntry,
    Resolution,
    WeightVersion,
    WorkerStatus,
)


@dataclass(frozen=True, slots=True)
class PolicyRecords:
    """What was read. Times are micros; `turns` holds, per `role/slot`, when each turn was written; `scores`:
    evaluations."""

    namespace: str
    policy: str
    weights: list[WeightVersion]
    ledger: list[LedgerEntry]
    resolutions: list[Resolution]
    grants: list[Grant]
    decisions: list[Decision]
    dead_letters: list[DeadLetter]
    workers: list[WorkerStatus]
    turns: dict[str, list[int]]
    now: int
    scores: list[Evaluation] = field(default_factory=list)


def read(bus: Bus, namespace: str, policy: str, now: int, resolve: Resolve = as_stored) -> PolicyRecords:
    """Read the small topics of a policy. `now` (micros) decides who counts as alive; `resolve` reads claims."""
    history = History(bus, namespace, policy, resolve)

    def fields(kind: Kind[R]) -> list[R]:
        """What cannot be read is left out: the audit names it."""
        return [row.record for row in history.rows(kind, own=True, unreadable=left_out)]

    turns: dict[str, list[int]] = {}
    for role in stages_of(policy):
        for record in history.records(turns_of(role)):
            turns.setdefault(f"{role}/{record.partition}", []).append(record.timestamp)
    return PolicyRecords(
        namespace,
        policy,
        weights=fields(WEIGHTS),
        ledger=fields(LEDGER),
        resolutions=fields(RESOLUTIONS),
        grants=fields(GRANTS),
        decisions=fields(DECISIONS),
        dead_letters=fields(DEAD_LETTERS),
        workers=fields(WORKERS),
        turns=turns,
        now=now,
        scores=fields(SCORES),
    )


SECOND = 1_000_000
EDGE = 10
"""versions at each end whose mean rewards are compared"""


@dataclass(frozen=True, slots=True)
class CommittedVersion:
    """One committed version."""

    version: int
    time: int
    """micros"""
    seconds: float
    """since the version before; 0 for the first, whose start is not known"""
    reward: float
    """mean over the batch's samples, NaN when none has one"""
    low: float
    """10th percentile of the groups' mean rewards"""
    high: float
    """90th percentile"""
    groups: int
    samples: int
    tokens: int
    """computed by all ranks"""
    shares: tuple[tuple[str, int, int], ...]
    """(member, samples, tokens) by rank"""
    heads: tuple[int, ...]
    """age of each group's oldest token"""
    tails: tuple[int, ...]
    """age of each group's newest token"""
    phases: tuple[tuple[str, float], ...]
    """(phase, seconds)"""
    eta: int
    """bound in force"""
    masked: int
    lost: int
    unchanged: str | None
    digest: str
    tickets: tuple[int, ...] = ()
    """of its groups, ascending"""


@dataclass(frozen=True, slots=True)
class FunnelStage:
    """One width of the funnel: so many groups came to it, and where those are that did not, the most first."""

    name: str
    groups: int
    left: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationScore:
    """What an evaluation came to."""

    what: str
    """the version, or the model that is none"""
    tasks: str
    asked: str
    mean: float
    """over tasks, NaN when none was judged"""
    error: float
    """of the mean, NaN when it is not known"""
    passed: tuple[tuple[str, float], ...]
    """(pass@k, share)"""
    time: int
    """micros"""


@dataclass(frozen=True, slots=True)
class Flow:
    """Counts over time: at `times[i]` (micros) so many tickets were granted, groups ready, ended otherwise, trained."""

    times: tuple[int, ...]
    granted: tuple[int, ...]
    ready: tuple[int, ...]
    negative: tuple[int, ...]
    trained: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything the page shows, and the live view may."""

    namespace: str
    policy: str
    time: int
    batch: int | None
    eta: int | None
    group_size: int | None
    steps: tuple[CommittedVersion, ...]
    granted: int
    resolved: dict[str, int]
    """resolutions by kind, settings left out"""
    reasons: tuple[tuple[str, str, int], ...]
    """(kind, reason, groups), the most frequent first"""
    settings: tuple[tuple[int, str, str, str], ...]
    """(micros, name, value, from where), as they came into force"""
    refused: tuple[tuple[str, str, int], ...]
    """(stage, reason, dead letters)"""
    flow: Flow
    faults: tuple[LearnerChange, ...]
    silences: tuple[QuietStages, ...]
    workers: tuple[tuple[WorkerStatus, bool], ...]
    """what each incarnation said last, and whether it lives; the living first"""
    evaluations: tuple[EvaluationScore, ...] = ()

    @property
    def version(self) -> int:
        """The newest version."""
        return self.steps[-1].version if self.steps else 0

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each version's batch, NaN left out."""
        return [step.reward for step in self.steps if step.reward == step.reward]

    @property
    def etas(self) -> list[int]:
        """Every staleness bound that was in force, in order."""
        return [
            eta for eta, _ in groupby([*([self.eta] if self.eta is not None else []), *(s.eta for s in self.steps)])
        ]

    @property
    def batches(self) -> list[int]:
        """Every B that was in force, in order."""
        first = [self.batch] if self.batch is not None else []
        return [batch for batch, _ in groupby([*first, *(step.groups for step in self.steps)])]

    @property
    def sizes(self) -> list[int]:
        """Every group size that was in force, in order."""
        first = [self.group_size] if self.group_size is not None else []
        later = (json.loads(value) for _, name, value, _ in self.settings if name == "group_size")
        return [size for size, _ in groupby([*first, *later])]

    @property
    def edges(self) -> tuple[float, float] | None:
        """Mean reward of the first and of the last ten versions; None with fewer than two versions."""
        rewards = self.rewards
        edge = min(EDGE, len(rewards) // 2)
        return (fmean(rewards[:edge]), fmean(rewards[-edge:])) if edge else None

    @property
    def oldest(self) -> int:
        """Age of the oldest trained token."""
        return max((age for step in self.steps for age in step.heads), default=0)

    @property
    def seconds(self) -> float:
        """From the first version to the last."""
        return sum(step.seconds for step in self.steps)

    @property
    def outstanding(self) -> int:
        """Tickets that are granted and not resolved."""
        return self.granted - sum(self.resolved.values()) + self.resolved.get("declined", 0)

    @property
    def funnel(self) -> tuple[FunnelStage, ...]:
        """From every group that was granted, or came unasked, to those that trained."""
        ends, ready_count = sum(self.resolved.values()), self.resolved.get("ready", 0)
        trained_count = sum(step.groups for step in self.steps)
        negative = [(kind, count) for kind, count in self.resolved.items() if kind != "ready"]
        return (
            FunnelStage("granted or came unasked", ends + self.outstanding),
            FunnelStage("came to an end", ends, (("outstanding", self.outstanding),)),
            FunnelStage("ready", ready_count, tuple(sorted(negative, key=lambda one: -one[1]))),
            FunnelStage("trained", trained_count, (("waiting for a batch", ready_count - trained_count),)),
        )

    def rate(self, field: str) -> float:
        """Samples, tokens or groups per second, over the whole run."""
        amount = sum(getattr(step, field) for step in self.steps if step.seconds)
        return amount / self.seconds if self.seconds else 0.0

    def phases(self) -> list[tuple[str, float]]:
        """Seconds by phase over all versions, the longest first."""
        total: defaultdict[str, float] = defaultdict(float)
        for step in self.steps:
            for name, seconds in step.phases:
                total[name] += seconds
        return sorted(total.items(), key=lambda item: -item[1])


def summary(bus: Bus, namespace: str, policy: str, now: int | None = None, resolve: Resolve = as_stored) -> Summary:
    """Read the small topics of a policy and sum them up. `resolve` reads claims of large records."""
    return summary_of(read(bus, namespace, policy, now or now_micros(), resolve))


def summary_of(records: PolicyRecords) -> Summary:
    """The summary of what was read."""
    first = next((event for event in records.weights if event["version"] == 0), None)
    groups = [row for row in records.resolutions if row["kind"] != "setting"]
    steps = _steps(records)
    extras = sum(1 for row in groups if row["ticket"] is not None and not row["solicited"])
    return Summary(
        namespace=records.namespace,
        policy=records.policy,
        time=records.now,
        batch=first["batch"] if first else None,
        eta=first["eta"] if first else None,
        group_size=first["group_size"] if first else None,
        steps=steps,
        granted=len({row["ticket"] for row in records.grants}) + extras,
        resolved=dict(Counter(row["kind"] for row in groups).most_common()),
        reasons=_reasons(groups),
        settings=_settings(records),
        refused=tuple(
            (stage, reason, count)
            for (stage, reason), count in Counter((r["stage"], r["reason"]) for r in records.dead_letters).most_common()
        ),
        flow=_flow(records, groups),
        faults=changes(records.ledger),
        silences=silences(records.turns, records.ledger),
        workers=_workers(records),
        evaluations=tuple(map(_score, records.scores)),
    )


def _steps(records: PolicyRecords) -> tuple[CommittedVersion, ...]:
    by_seq = {row["seq"]: row for row in records.resolutions if row["kind"] == "ready"}
    steps: list[CommittedVersion] = []
    before: LedgerEntry | None = None
    for entry in records.ledger:
        if entry["version"] > 0:
            batch = [by_seq[group["seq"]] for group in entry["groups"] if group["seq"] in by_seq]
            steps.append(_step(entry, batch, before))
        before = entry
    return tuple(steps)


def _step(entry: LedgerEntry, batch: Sequence[Resolution], before: LedgerEntry | None) -> CommittedVersion:
    """`before` is the entry of the version it was trained from; version 0's time says nothing of a step's length."""
    parent = entry["version"] - 1
    means = [fmean(values) for row in batch if (values := [r for r in row["rewards"] if r == r])]
    rewards = [reward for row in batch for reward in row["rewards"] if reward == reward]
    low, high = np.percentile(means, [10, 90]).tolist() if means else (float("nan"), float("nan"))
    metrics = entry["metrics"]
    phases = [(name.removeprefix("timings_"), value) for name, value in sorted(metrics.items()) if _is_phase(name)]
    return CommittedVersion(
        version=entry["version"],
        time=entry["time"],
        seconds=(entry["time"] - before["time"]) / SECOND if before and before["version"] else 0.0,
        reward=fmean(rewards) if rewards else metrics.get("reward_mean", float("nan")),
        low=low,
        high=high,
        groups=len(entry["groups"]),
        samples=sum(rank["samples"] for rank in entry["ranks"]),
        tokens=sum(rank["tokens"] for rank in entry["ranks"]),
        shares=tuple((rank["member"], rank["samples"], rank["tokens"]) for rank in entry["ranks"]),
        heads=tuple(parent - row["v_head"] for row in batch if row["v_head"] >= 0),
        tails=tuple(parent - row["v_tail"] for row in batch if row["v_tail"] >= 0),
        phases=tuple(phases),
        eta=entry["eta"],
        masked=entry["masked_tokens"],
        lost=sum(group["lost"] is not None for group in entry["groups"]),
        unchanged=entry["unchanged"],
        digest=entry["digest"],
        tickets=tuple(sorted(row["ticket"] for row in batch if row["ticket"] is not None)),
    )


def _is_phase(name: str) -> bool:
    """Phases are exclusive; these two are sums of them, and what happened beside them counts in neither."""
    return name.startswith("timings_") and not name.startswith(("timings_total", "timings_step", "timings_beside_"))


def _reasons(groups: Sequence[Resolution]) -> tuple[tuple[str, str, int], ...]:
    counts = Counter((row["kind"], _cause(row["reason"] or "")) for row in groups if row["kind"] != "ready")
    return tuple((kind, reason, count) for (kind, reason), count in counts.most_common(20))


def _cause(reason: str) -> str:
    """A reason without which samples it was about: `0: redacted; 3: redacted` is `redacted`."""
    return "; ".join(dict.fromkeys(re.sub(r"^\d+: ", "", part) for part in reason.split("; ")))


def _settings(records: PolicyRecords) -> tuple[tuple[int, str, str, str], ...]:
    out = []
    for row in records.resolutions:
        setting = row["setting"]
        if row["kind"] == "setting" and setting is not None:
            where = "at once"
            if setting["from_seq"] is not None:
                where = f"from seq {setting['from_seq']}"
            elif setting["from_ticket"] is not None:
                where = f"from ticket {setting['from_ticket']}"
            out.append((row["time"], setting["name"], setting["value"], where))
    return tuple(out)


def _flow(records: PolicyRecords, groups: Sequence[Resolution]) -> Flow:
    """Cumulative counts at up to 300 moments between the first and the last."""
    grant_times = sorted(row["time"] for row in records.grants if row["round"] == 0)
    ready_times = sorted(row["time"] for row in groups if row["kind"] == "ready")
    negative = sorted(row["time"] for row in groups if row["kind"] != "ready")
    training_times = sorted(entry["time"] for entry in records.ledger for _ in entry["groups"])
    moments = sorted([*grant_times, *ready_times, *negative, *training_times])
    if not moments:
        return Flow((), (), (), (), ())
    times = np.linspace(moments[0], moments[-1], min(300, len(moments)))

    def counts(at: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(count) for count in np.searchsorted(np.array(at), times, "right"))

    return Flow(
        tuple(int(t) for t in times), counts(grant_times), counts(ready_times), counts(negative), counts(training_times)
    )


def _workers(records: PolicyRecords) -> tuple[tuple[WorkerStatus, bool], ...]:
    statuses = [row for row in records.workers if row["role"] != DRAIN]
    newest = {(row["worker"], row["incarnation"]): row for row in statuses}.values()
    states = [(row, row["expires_at"] > records.now and row["state"] not in ("stopped", "failed")) for row in newest]
    return tuple(sorted(states, key=lambda one: (not one[1], one[0]["role"], one[0]["worker"], one[0]["time"])))


def _score(evaluation: Evaluation) -> EvaluationScore:
    versions = evaluation["versions"]
    name = evaluation["model"] if not versions else f"versions {min(versions)} to {max(versions)}"
    mean, error = evaluation["mean"], evaluation["standard_error"]
    return EvaluationScore(
        name if evaluation["version"] is None else f"version {evaluation['version']}",
        evaluation["tasks"],
        f"{evaluation['questions']} × {evaluation['samples']}",
        math.nan if mean is None else mean,
        math.nan if error is None else error,
        tuple(
            (f"pass@{k}", share)
            for k, share in sorted(evaluation["pass_at"].items(), key=lambda one: (len(one[0]), one))
        ),
        evaluation["time"],
    )
