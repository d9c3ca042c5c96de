"""What becomes of a group at its end: its samples as Trajectory records, and what is said about it.

Invariants: a sample trains only if its attempt ended as it should, has no flaw, a reward and a trainable token; every
sample that ended is written, good or not, so that nothing is lost from view; a group is said to be complete only with
all its good samples and their places, in one transaction with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from millrace.infra.stages.base import later
from millrace.schemas.records import Completion, CompletionKind, EpisodeStatus, Trajectory
from millrace.streams.seal.assemble import TracedCall, assemble
from millrace.streams.seal.attempts import Attempt, OpenGroup
from millrace.streams.seal.rewards import combine, sealed_rewards, silent_sources

ShortPolicy = Literal["drop", "train", "top-up"]
GOOD_ENDS = ("completed", "truncated")
MINIMUM = 2
"""samples that a group's baseline needs"""


@dataclass(frozen=True, slots=True)
class ClosingRules:
    """How groups are closed. Times in micros of log time."""

    short_policy: ShortPolicy = "drop"
    patience: int = 300_000_000
    """how long after its first attempt began a group waits for samples that never end"""
    rounds: int = 2
    """how often the missing samples of a group are asked for again"""
    memory: int = 3_600_000_000
    """how long a sealed group is remembered, so that what comes late is recognised"""
    partial_rewards: bool = False
    """whether a sample trains although an awaited reward is missing or failed, on what it has"""


@dataclass(frozen=True, slots=True)
class EndedSample:
    """One ended sample, ready to be written."""

    number: int
    record: Trajectory
    is_good: bool
    trace: str | None

    @property
    def ref(self) -> str:
        return f"sample-{self.number}"


def sample_of(
    number: int,
    attempt: Attempt,
    calls: Sequence[TracedCall],
    group: OpenGroup,
    rules: ClosingRules,
    now: int,
) -> EndedSample:
    """The Trajectory record of an attempt that won its sample, and whether it may train."""
    assembly = assemble(calls)
    judgements = (attempt["rewards"], group["rewards"])
    missing = silent_sources(attempt["awaits"], *judgements)
    reward = combine(attempt["awaits"], *judgements, partial=rules.partial_rewards)
    has_finished = attempt["status"] in GOOD_ENDS or (group["ticket"] is None and attempt["status"] == "abandoned")
    flaw = attempt["flaw"] or (None if has_finished else f"status_{attempt['status']}")
    if flaw is not None:
        reasons = [
            *assembly.exclusions,
            *(f"{call}:{flaw}" for lineage in assembly.lineages for call in lineage["calls"]),
        ]
        if not any(entry.endswith(f":{flaw}") for entry in reasons):  # calls without tokens have reasons of their own
            reasons.append(f"*:{flaw}")
    else:
        reasons = assembly.exclusions
    record: Trajectory = {
        "id": attempt["trajectory"],
        "policy": group["policy"],
        "tenant": group["tenant"],
        "group": group["group"],
        "ticket": group["ticket"],
        "sample": number,
        "attempt": attempt["attempt"],
        "task_id": attempt["task"],
        "split": group["split"],
        "status": cast(EpisodeStatus, attempt["status"]),
        "reward": reward,
        "rewards": sealed_rewards(*judgements),
        "missing": missing,
        "lineages": [] if flaw else assembly.lineages,
        "excluded": reasons,
        "v_head": -1 if flaw else assembly.v_head,
        "v_tail": -1 if flaw else assembly.v_tail,
        "tokens": 0 if flaw else assembly.tokens,
        "length": 0 if flaw else assembly.length,
        "events": [call["place"] for call in calls],
        "sealed_at": now,
    }
    is_good = flaw is None and assembly.tokens > 0 and reward is not None and math.isfinite(reward)
    return EndedSample(number, record, is_good, attempt["trace"])


def verdict(group: OpenGroup, samples: Sequence[EndedSample], rules: ClosingRules) -> CompletionKind | None:
    """The kind of the group's completion; None when there is nothing to say about it (evaluation, unfit traffic)."""
    count = sum(sample.is_good for sample in samples)
    is_whole = count == group["size"]
    enough = is_whole or (rules.short_policy == "train" and count >= min(MINIMUM, group["size"]))
    if group["split"] == "evaluation":
        return None
    if group["ticket"] is None:
        return "unsolicited" if enough else None
    if enough:
        return "complete"
    return "top_up" if rules.short_policy == "top-up" and group["round"] < rules.rounds else "short"


def completion(
    kind: CompletionKind, group: OpenGroup, samples: Sequence[EndedSample], slot: int, now: int
) -> Completion:
    """The Completion record about a group; the places of its samples are those of their emits."""
    good_samples = [sample for sample in samples if sample.is_good]
    there = {sample.number for sample in good_samples}
    missing = [number for number in range(group["size"]) if number not in there]
    return {
        "kind": kind,
        "policy": group["policy"],
        "slot": slot,
        "time": now,
        "group": group["group"],
        "ticket": group["ticket"],
        "size": group["size"],
        "samples": [sample.number for sample in good_samples],
        "missing": missing,
        "trajectories": [] if kind == "top_up" else [later(sample.ref) for sample in good_samples],
        "tokens": [sample.record["length"] for sample in good_samples],
        "rewards": [
            math.nan if sample.record["reward"] is None else sample.record["reward"] for sample in good_samples
        ],
        "v_head": min((sample.record["v_head"] for sample in good_samples), default=-1),
        "v_tail": max((sample.record["v_tail"] for sample in good_samples), default=-1),
        "reason": why_short(samples, group) if missing else None,
    }


def why_short(samples: Sequence[EndedSample], group: OpenGroup) -> str:
    """Which samples are missing and why, in words."""
    by_number = {sample.number: sample for sample in samples}
    parts = []
    for number in range(group["size"]):
        sample = by_number.get(number)
        if sample is None:
            parts.append(f"{number}: never ended")
        elif not sample.is_good:
            parts.append(f"{number}: {why_bad(sample)}")
    return "; ".join(parts)


def why_bad(sample: EndedSample) -> str:
    """Why an ended sample may not train, in one word."""
    record = sample.record
    if not record["lineages"]:
        return record["excluded"][0].rpartition(":")[2] if record["excluded"] else "no trainable token"
    return "no reward" if record["reward"] is None else "reward is not finite"
