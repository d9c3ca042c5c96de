"""What seal keeps of attempts and groups, and the pure steps between one state and the next.

Keys: `t/<tenant>/<root>` an attempt, `c/<tenant>/<root>` its calls (appended), `g/<policy>/<tenant>/<group>` a group
with at least one attempt, `z/...` the tombstone of a sealed group. An attempt is a root trajectory with its sub-agents.

Invariants: the first attempt of a sample that ended, in partition order, is the sample; nothing changes that later,
unless a top-up asks for the sample again."""

from __future__ import annotations

from typing import TypedDict

from millrace.infra.stages.base import Key, Table
from millrace.schemas import bounds
from millrace.schemas.records import EpisodeStarted, EpisodeStatus, Event, ModelCall, Place, Split
from millrace.streams.seal.assemble import TracedCall
from millrace.streams.seal.rewards import Judgements

TRAINABLE = ("tenant_only", "aggregate")
"""eligibilities that may train: refine has already looked at whose policy it is"""
CHAIN_FLAWS = frozenset({"step_gap", "chain_broken", "split_changed", "gap"})
"""reasons of refine that taint the whole attempt, whichever event carries them"""


class Attempt(TypedDict):
    """One run of a sample."""

    policy: str
    tenant: str
    group: str
    trajectory: str
    id: str | None
    """of the event that started it"""
    sample: int
    attempt: str
    task: str
    awaits: list[str]
    wait: int
    """micros from its end to its reward deadline"""
    place: Place
    """of the event that started it"""
    trace: str | None
    flaw: str | None
    """why nothing of it may train"""
    status: EpisodeStatus | None
    """how it ended"""
    closed: str | None
    """why it does not count"""
    rewards: Judgements


class OpenGroup(TypedDict):
    """A group that is not sealed."""

    policy: str
    tenant: str
    group: str
    ticket: int | None
    split: Split
    size: int
    round: int
    attempts: list[str]
    winners: dict[str, str]
    """sample -> the attempt that ended first"""
    settled: list[int]
    """samples for which nothing more is awaited"""
    rewards: Judgements
    """judgements of the whole group"""


ATTEMPTS = Table[Attempt]("t/")
CALLS = Table[TracedCall]("c/")
GROUPS = Table[OpenGroup]("g/")
TOMBSTONES = Table[bool]("z/")


def group_key(of: Event | Attempt) -> Key[OpenGroup]:
    """The state key of an event's or attempt's group."""
    return GROUPS.key(f"{of['policy']}/{of['tenant']}/{of['group']}")


def attempt_key(of: Event | Attempt | OpenGroup, root: str) -> Key[Attempt]:
    """The state key of an attempt. Tenants never see each other's ids."""
    return ATTEMPTS.key(f"{of['tenant']}/{root}")


def calls_key(of: Attempt | OpenGroup, root: str) -> Key[TracedCall]:
    """The state key of an attempt's calls."""
    return CALLS.key(f"{of['tenant']}/{root}")


def tombstone_key(group: Key[OpenGroup]) -> Key[bool]:
    """The state key that a sealed group leaves behind."""
    return TOMBSTONES.key(group.removeprefix(GROUPS.prefix))


def attempt_of(event: Event, body: EpisodeStarted, place: Place, trace: str | None) -> Attempt:
    """A new attempt, from its start event, which lies at `place`: it runs, and nothing yet speaks against it."""
    return {
        "policy": event["policy"],
        "tenant": event["tenant"],
        "group": event["group"],
        "trajectory": event["root_trajectory"],
        "id": event["id"],
        "sample": body["sample"],
        "attempt": event["attempt"],
        "task": body["task_id"],
        "awaits": list(body["awaits"]),
        "wait": body["reward_deadline_ms"] * 1000,
        "place": {**place},
        "trace": trace,
        "flaw": None,
        "status": None,
        "closed": None,
        "rewards": {},
    }


def group_of(event: Event, body: EpisodeStarted) -> OpenGroup:
    """A new group, from the start of its first attempt. A root trajectory alone is a group of one."""
    alone = body["ticket"] is None and event["group"] == event["root_trajectory"]
    return {
        "policy": event["policy"],
        "tenant": event["tenant"],
        "group": event["group"],
        "ticket": body["ticket"],
        "split": event["split"],
        "size": 1 if alone else max(1, body["group_size"]),
        "round": 0,
        "attempts": [],
        "winners": {},
        "settled": [],
        "rewards": {},
    }


def refusal(group: OpenGroup, event: Event, body: EpisodeStarted) -> str | None:
    """Why an attempt cannot belong to its group, None when it can."""
    if group["size"] > bounds.GROUP_SIZE:
        return "out_of_bounds"
    if len(group["attempts"]) >= bounds.ATTEMPTS:
        return "too_many_attempts"
    if body["ticket"] != group["ticket"] or event["split"] != group["split"]:
        return "wrong_group"
    return None if 0 <= body["sample"] < group["size"] else "bad_sample"


def flaw_of(event: Event) -> str | None:
    """What an event's governance says against its whole attempt."""
    governance = event["governance"]
    if governance is None:
        return "ungoverned"
    if governance["reason"] in CHAIN_FLAWS:
        return governance["reason"]
    if event["kind"] in ("episode_started", "episode_ended") and governance["eligibility"] not in TRAINABLE:
        return governance["reason"]
    return "gap" if event["kind"] == "gap" else None


def call_of(event: Event, body: ModelCall, policy: str, place: Place) -> TracedCall:
    """What assembly needs of a model call."""
    why: str | None = None
    governance = event["governance"]
    if event["policy"] != policy:
        why = "other_policy"
    elif not body["trainable"]:
        why = body["untrainable_reason"] or "untrainable"
    elif governance is None:
        why = "ungoverned"
    elif governance["eligibility"] not in TRAINABLE:
        why = governance["reason"]
    return {
        "response": body["response_id"],
        "lineage": body["lineage"],
        "keep": body["prefix_len"],
        "prompt": body["prompt_ids"],
        "output": body["output_ids"],
        "logprobs": body["output_logprobs"],
        "versions": body["output_versions"],
        "supersedes": body["supersedes"],
        "why": why,
        "place": {**place},
    }


def is_complete(group: OpenGroup) -> bool:
    """Whether every sample has ended and been judged, or waited for in vain."""
    return len(group["settled"]) >= group["size"]


def settle(group: OpenGroup, sample: int) -> OpenGroup:
    """The group once nothing more is awaited for a sample."""
    return {**group, "settled": sorted({*group["settled"], sample})}
