"""Everything that the log says of one trajectory, as plain values that terminal, page and programs show alike. Pure.

Invariants: turns are in log order, each under the trace (root or sub-agent) that it belongs to; every reward that names
the trajectory is here with its fate, whatever became of it; only governed events are read, so what was taken out or
withheld is not shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from millrace.consumers.audit.command import spot
from millrace.consumers.trajectory.find import FoundTrajectory
from millrace.consumers.trajectory.tokens import Traced, traced
from millrace.consumers.why.event_text import spoken
from millrace.consumers.why.render import event_line
from millrace.consumers.why.story import Passage, Story
from millrace.consumers.why.verdict import verdict
from millrace.infra.log.history.requests import WholeRequests
from millrace.infra.log.history.rows import Row, place_of
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event, LedgerEntry, Reward, TrainedGroup, Trajectory

BATCH = ("kl", "clip", "ratio", "rejected", "importance", "entropy", "prox")
"""beginnings or parts of the names of metrics that say how tokens of the batch were weighed"""


@dataclass(frozen=True, slots=True)
class EventAccount:
    """One event. said: (who or what, text) of all that it says; notes: what is out of the ordinary."""

    step: int | None
    kind: str
    line: str
    time: int
    """micros; when it happened"""
    place: str
    said: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TraceAccount:
    """The events of one trace of the episode: the root's, or a sub-agent's with the trace that spawned it."""

    id: str
    parent: str | None
    turns: tuple[EventAccount, ...]


@dataclass(frozen=True, slots=True)
class AccountedReward:
    """One reward and what became of it: counted, or the reason why not."""

    source: str
    target: str
    value: float | None
    failure: str | None
    rubric: str
    fate: str
    detail: str
    critique: str | None
    place: str


@dataclass(frozen=True, slots=True)
class TrainedIn:
    """The version that its group trained. advantage: its reward over the mean of its group, before any scale; batch:
    how the tokens of the whole batch were weighed, as far as the ledger says."""

    version: int
    seq: int
    place: str
    lost: str | None
    eta: int
    masked_tokens: int
    advantage: float | None
    batch: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Account:
    """One trajectory."""

    id: str
    tenant: str
    group: str
    attempt: str
    verdict: str
    ticket: int | None
    task: str | None
    sample: int | None
    split: str | None
    status: str | None
    reward: float | None
    missing: tuple[str, ...]
    excluded: tuple[str, ...]
    place: str | None
    """where it was sealed"""
    branches: tuple[TraceAccount, ...]
    rewards: tuple[AccountedReward, ...]
    lineages: tuple[Traced, ...]
    trained: tuple[TrainedIn, ...]

    def as_json(self) -> dict[str, Any]:
        """For programs; what is no number of JSON is null."""
        found = finite(asdict(self))
        assert isinstance(found, dict)
        return found


def account(story: Story, found: FoundTrajectory) -> Account:
    """The account of one trajectory out of the story of its group."""
    own = [p for p in story.passages if p.row is not None and p.row["root_trajectory"] == found.id]
    sealed = next((row for row in story.samples if row["id"] == found.id and row["tenant"] == found.tenant), None)
    training = list(story.trained()) if sealed is not None and _may_have_trained(story, sealed) else []
    entry, group = training[0] if training else (None, None)
    lost = group is not None and group["lost"] is not None
    return Account(
        id=found.id,
        tenant=found.tenant,
        group=found.group,
        attempt=sealed["attempt"] if sealed is not None else found.attempt,
        verdict=verdict(story),
        ticket=story.ticket,
        task=sealed["task_id"] if sealed is not None else _task(own),
        sample=sealed["sample"] if sealed is not None else None,
        split=sealed["split"] if sealed is not None else next((p.row["split"] for p in own if p.row), None),
        status=sealed["status"] if sealed is not None else None,
        reward=sealed["reward"] if sealed is not None else None,
        missing=tuple(sealed["missing"]) if sealed is not None else (),
        excluded=tuple(sealed["excluded"]) if sealed is not None else (),
        place=spot(sealed.place) if sealed is not None else None,
        branches=_branches(own),
        rewards=_rewards(story, own, sealed),
        lineages=tuple(traced(one, entry, lost=lost) for one in sealed["lineages"]) if sealed is not None else (),
        trained=tuple(_trained(story, row, one, sealed) for row, one in training),
    )


def _may_have_trained(story: Story, sealed: Row[Trajectory]) -> bool:
    """Whether it is one of the samples that its resolution names."""
    return any(sealed.place in row.places() for row in story.resolutions if row["kind"] == "ready")


def _task(own: list[Passage]) -> str | None:
    for passage in own:
        row = passage.row
        if row is not None and row["kind"] in ("episode_started", "episode_ended"):
            try:
                return str(row.body["task_id"])
            except SchemaError:
                return None
    return None


def _branches(own: list[Passage]) -> tuple[TraceAccount, ...]:
    turns: dict[str, list[EventAccount]] = {}
    parents: dict[str, str | None] = {}
    told: set[str] = set()
    requests = WholeRequests()
    for passage in own:
        row = passage.row
        if row is None or row["id"] in told:  # sent twice
            continue
        told.add(row["id"])
        turns.setdefault(row["trajectory"], []).append(_turn(passage, row, requests))
        parents.setdefault(row["trajectory"], row["parent_trajectory"])
    return tuple(TraceAccount(id, parents[id], tuple(found)) for id, found in turns.items())


def _turn(passage: Passage, row: Row[Event], requests: WholeRequests) -> EventAccount:
    notes = [f"{letter['stage']}: {letter['reason']} ({letter['detail']})" for letter in passage.letters]
    if passage.event is None and not passage.letters:
        notes.append("not refined yet")
    governance = row["governance"]
    if governance is not None and governance["eligibility"] in ("denied", "audit_only"):
        notes.append(f"{governance['eligibility']}: {governance['reason']}")
    if governance is not None and governance["redaction"] != "none_needed":
        notes.append(f"redaction {governance['redaction']}")
    said = spoken(passage.event, requests) if passage.event is not None else []
    step = row["step"] if row["source_seq"] is not None else None
    return EventAccount(
        step, row["kind"], event_line(row), row["event_time"], spot(row.place), tuple(said), tuple(notes)
    )


def _rewards(story: Story, own: list[Passage], sealed: Row[Trajectory] | None) -> tuple[AccountedReward, ...]:
    """Rewards of this trajectory, and those of the whole group."""
    counted = {(one["source"], one["reward_id"]) for one in sealed["rewards"]} if sealed is not None else set()
    out: list[AccountedReward] = []
    shared = [p for p in story.passages if p not in own and p.row is not None and p.row["kind"] == "reward"]
    for passage in [*own, *shared]:
        row = passage.row
        if row is None or row["kind"] != "reward":
            continue
        try:
            body: Reward = row.body
        except SchemaError:
            continue
        if passage in shared and (body["target_kind"] != "group" or body["target"] != story.subject.group):
            continue
        fate, detail = _fate(passage, body, counted, sealed=sealed is not None)
        out.append(
            AccountedReward(
                body["source"],
                f"{body['target_kind']} {body['target']}",
                body["value"],
                body["failure"],
                body["rubric_version"],
                fate,
                detail,
                body["critique"] if passage.event is not None else None,
                spot(row.place),
            )
        )
    return tuple(out)


def _fate(passage: Passage, body: Reward, counted: set[tuple[str, str]], *, sealed: bool) -> tuple[str, str]:
    for letter in passage.letters:
        return letter["reason"], letter["detail"]
    if (body["source"], body["reward_id"]) in counted:
        return "counted", ""
    return (
        ("not counted", "it is no part of the sealed sample") if sealed else ("waits", "its sample is not sealed yet")
    )


def _trained(story: Story, row: Row[LedgerEntry], group: TrainedGroup, sealed: Row[Trajectory] | None) -> TrainedIn:
    places = {place_of(place) for place in group["trajectories"]}
    rewards = [one["reward"] for one in story.samples if one.place in places and one["reward"] is not None]
    own = sealed["reward"] if sealed is not None else None
    advantage = own - fmean(rewards) if own is not None and rewards else None
    batch = {
        name: value
        for name, value in sorted(row["metrics"].items())
        if any(part in name for part in BATCH) and not name.startswith(("timings_", "tokens_"))
    }
    place = spot(row.place)
    masked, eta = row["masked_tokens"], row["eta"]
    return TrainedIn(row["version"], group["seq"], place, group["lost"], eta, masked, advantage, batch)


def finite(value: Any) -> Any:
    """A value as JSON takes it: NaN and infinity are null."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
