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
from millrace.streams.seal.rewards import combined, sealed, silent

Short = Literal["drop", "train", "top-up"]
FINISHED = ("completed", "truncated")
MINIMUM = 2
"""samples that a group's baseline needs"""


@dataclass(frozen=True, slots=True)
class ClosingRules:
    """How groups are closed. Times in micros of log time."""

    short: Short = "drop"
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
    good: bool
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
    made = assemble(calls)
    counted = (attempt["rewards"], group["rewards"])
    missing = silent(attempt["awaits"], *counted)
    reward = combined(attempt["awaits"], *counted, partial=rules.partial_rewards)
    finished = attempt["status"] in FINISHED or (group["ticket"] is None and attempt["status"] == "abandoned")
    flaw = attempt["flaw"] or (None if finished else f"status_{attempt['status']}")
    if flaw is not None:
        excluded = [*made.excluded, *(f"{call}:{flaw}" for lineage in made.lineages for call in lineage["calls"])]
        if not any(entry.endswith(f":{flaw}") for entry in excluded):  # calls without tokens have reasons of their own
            excluded.append(f"*:{flaw}")
    else:
        excluded = made.excluded
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
        "rewards": sealed(*counted),
        "missing": missing,
        "lineages": [] if flaw else made.lineages,
        "excluded": excluded,
        "v_head": -1 if flaw else made.v_head,
        "v_tail": -1 if flaw else made.v_tail,
        "tokens": 0 if flaw else made.tokens,
        "length": 0 if flaw else made.length,
        "events": [call["place"] for call in calls],
        "sealed_at": now,
    }
    good = flaw is None and made.tokens > 0 and reward is not None and math.isfinite(reward)
    return EndedSample(number, record, good, attempt["trace"])


def verdict(group: OpenGroup, samples: Sequence[EndedSample], rules: ClosingRules) -> CompletionKind | None:
    """The kind of the group's completion; None when there is nothing to say about it (evaluation, unfit traffic)."""
    good = sum(sample.good for sample in samples)
    whole = good == group["size"]
    enough = whole or (rules.short == "train" and good >= min(MINIMUM, group["size"]))
    if group["split"] == "evaluation":
        return None
    if group["ticket"] is None:
        return "unsolicited" if enough else None
    if enough:
        return "complete"
    return "top_up" if rules.short == "top-up" and group["round"] < rules.rounds else "short"


def completion(
    kind: CompletionKind, group: OpenGroup, samples: Sequence[EndedSample], slot: int, now: int
) -> Completion:
    """The Completion record about a group; the places of its samples are those of their emits."""
    good = [sample for sample in samples if sample.good]
    there = {sample.number for sample in good}
    missing = [number for number in range(group["size"]) if number not in there]
    return {
        "kind": kind,
        "policy": group["policy"],
        "slot": slot,
        "time": now,
        "group": group["group"],
        "ticket": group["ticket"],
        "size": group["size"],
        "samples": [sample.number for sample in good],
        "missing": missing,
        "trajectories": [] if kind == "top_up" else [later(sample.ref) for sample in good],
        "tokens": [sample.record["length"] for sample in good],
        "rewards": [math.nan if sample.record["reward"] is None else sample.record["reward"] for sample in good],
        "v_head": min((sample.record["v_head"] for sample in good), default=-1),
        "v_tail": max((sample.record["v_tail"] for sample in good), default=-1),
        "reason": why_short(samples, group) if missing else None,
    }


def why_short(samples: Sequence[EndedSample], group: OpenGroup) -> str:
    """Which samples are missing and why, in words."""
    ended = {sample.number: sample for sample in samples}
    parts = []
    for number in range(group["size"]):
        sample = ended.get(number)
        if sample is None:
            parts.append(f"{number}: never ended")
        elif not sample.good:
            parts.append(f"{number}: {why_bad(sample)}")
    return "; ".join(parts)


def why_bad(sample: EndedSample) -> str:
    """Why an ended sample may not train, in one word."""
    record = sample.record
    if not record["lineages"]:
        return record["excluded"][0].rpartition(":")[2] if record["excluded"] else "no trainable token"
    return "no reward" if record["reward"] is None else "reward is not finite"
