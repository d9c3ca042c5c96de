"""The account of one episode: everything that the log says of its trajectory, as plain values that terminal, page and
programs show alike. Pure.

Invariants: turns are in log order, each under the trace (root or sub-agent) that it belongs to; every reward that names
the trajectory is here with its fate, whatever became of it; only governed events are read, so what was taken out or
withheld is not shown; runs of tokens follow each other without a hole and hold every token once, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import fmean
from typing import Any, Literal

import numpy as np

from millrace.consumers.audit.command import spot
from millrace.consumers.tell.events import event_line, governance_notes, texts_in
from millrace.consumers.tell.story import Passage, Story, verdict
from millrace.consumers.tell.subject import EpisodeIds
from millrace.infra.log.history.requests import WholeRequests
from millrace.infra.log.history.rows import Row, place_of
from millrace.infra.terminal import finite
from millrace.schemas.arrays import unpack
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event, LedgerEntry, Lineage, Reward, TrainedGroup, Trajectory

Weight = Literal["context", "left out", "may train", "trained", "stale"]
"""What a token counts in the loss: `context` was read and not sampled; `left out` was sampled and may not train;
`may train` has a mask of 1 and no version trained on it (yet); `trained` counted; `stale` was masked in its version
because it was older than eta allowed."""
Spell = Callable[[int], str]
"""the text of a token"""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens [start, end) of a lineage. version: that sampled them, None for context; logprob: their mean
    log-probability, None where none is kept."""

    start: int
    end: int
    version: int | None
    weight: Weight
    logprob: float | None
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """One lineage: its runs, and how many of its tokens have which weight. unreadable: why there are no runs, where
    its arrays are none."""

    id: str
    runs: tuple[TokenRun, ...]
    calls: tuple[str, ...]
    unreadable: str | None = None

    @property
    def length(self) -> int:
        """Its tokens."""
        return self.runs[-1].end if self.runs else 0

    def count(self) -> dict[str, int]:
        """Tokens by weight."""
        out: dict[str, int] = {}
        for run in self.runs:
            out[run.weight] = out.get(run.weight, 0) + run.end - run.start
        return out


def runs_of(lineage: Lineage, entry: Row[LedgerEntry] | None, *, is_lost: bool = False) -> TokenRuns:
    """The runs of a lineage; `entry`: of the version that trained on it, `is_lost` where it could not read it."""
    arrays = (lineage["tokens"], lineage["mask"], lineage["logprobs"], lineage["versions"])
    try:
        parts = [unpack(array) for array in arrays]
    except SchemaError as error:
        return TokenRuns(lineage["id"], (), tuple(lineage["calls"]), unreadable=str(error))
    many = min(len(part) for part in parts)
    tokens, mask, logprobs, versions = (part[:many].tolist() for part in parts)
    oldest = entry["version"] - 1 - entry["eta"] if entry is not None and entry["masked_tokens"] else None
    weights = [
        _weight(bool(one), version, is_trained=entry is not None and not is_lost, oldest=oldest)
        for one, version in zip(mask, versions, strict=True)
    ]
    runs = []
    for (version, weight), members in groupby(range(many), key=lambda at: (versions[at], weights[at])):
        at = list(members)
        means = [logprobs[one] for one in at] if mask[at[0]] else []
        runs.append(
            TokenRun(
                at[0],
                at[-1] + 1,
                version if version >= 0 else None,
                weight,
                float(np.mean(means)) if means else None,
                tuple(tokens[one] for one in at),
                tuple(means),
            )
        )
    return TokenRuns(lineage["id"], tuple(runs), tuple(lineage["calls"]))


def _weight(mask: bool, version: int, *, is_trained: bool, oldest: int | None) -> Weight:
    if not mask:
        return "context" if version < 0 else "left out"
    if not is_trained:
        return "may train"
    return "stale" if oldest is not None and version < oldest else "trained"


def texts_of(run: TokenRun, spell: Spell | None) -> Sequence[str]:
    """Each token's text, or its number where no tokenizer is known."""
    return [spell(token) if spell is not None else str(token) for token in run.tokens]


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
    lineages: tuple[TokenRuns, ...]
    trained: tuple[TrainedIn, ...]

    def as_json(self) -> dict[str, Any]:
        """For programs; what is no number of JSON is null."""
        value: dict[str, Any] = finite(asdict(self))
        return value


def account(story: Story, ids: EpisodeIds) -> Account:
    """The account of one trajectory out of the story of its group."""
    passages = [p for p in story.passages if p.row is not None and p.row["root_trajectory"] == ids.id]
    sample = next((row for row in story.samples if row["id"] == ids.id and row["tenant"] == ids.tenant), None)
    training = list(story.training()) if sample is not None and _may_have_trained(story, sample) else []
    entry, group = training[0] if training else (None, None)
    is_lost = group is not None and group["lost"] is not None
    return Account(
        id=ids.id,
        tenant=ids.tenant,
        group=ids.group,
        attempt=sample["attempt"] if sample is not None else ids.attempt,
        verdict=verdict(story),
        ticket=story.ticket,
        task=sample["task_id"] if sample is not None else _task(passages),
        sample=sample["sample"] if sample is not None else None,
        split=sample["split"] if sample is not None else next((p.row["split"] for p in passages if p.row), None),
        status=sample["status"] if sample is not None else None,
        reward=sample["reward"] if sample is not None else None,
        missing=tuple(sample["missing"]) if sample is not None else (),
        excluded=tuple(sample["excluded"]) if sample is not None else (),
        place=spot(sample.place) if sample is not None else None,
        branches=_branches(passages),
        rewards=_rewards(story, passages, sample),
        lineages=tuple(runs_of(one, entry, is_lost=is_lost) for one in sample["lineages"])
        if sample is not None
        else (),
        trained=tuple(_training(story, row, one, sample) for row, one in training),
    )


def _may_have_trained(story: Story, sample: Row[Trajectory]) -> bool:
    """Whether it is one of the samples that its resolution names."""
    return any(sample.place in row.places() for row in story.resolutions if row["kind"] == "ready")


def _task(passages: list[Passage]) -> str | None:
    for passage in passages:
        row = passage.row
        if row is not None and row["kind"] in ("episode_started", "episode_ended"):
            try:
                return str(row.body["task_id"])
            except SchemaError:
                return None
    return None


def _branches(passages: list[Passage]) -> tuple[TraceAccount, ...]:
    turns: dict[str, list[EventAccount]] = {}
    parents: dict[str, str | None] = {}
    ids: set[str] = set()
    requests = WholeRequests()
    for passage in passages:
        row = passage.row
        if row is None or row["id"] in ids:  # sent twice
            continue
        ids.add(row["id"])
        turns.setdefault(row["trajectory"], []).append(_turn(passage, row, requests))
        parents.setdefault(row["trajectory"], row["parent_trajectory"])
    return tuple(TraceAccount(id, parents[id], tuple(events)) for id, events in turns.items())


def _turn(passage: Passage, row: Row[Event], requests: WholeRequests) -> EventAccount:
    notes = [f"{letter['stage']}: {letter['reason']} ({letter['detail']})" for letter in passage.letters]
    if passage.event is None and not passage.letters:
        notes.append("not refined yet")
    notes += governance_notes(row)
    texts = texts_in(passage.event, requests) if passage.event is not None else []
    step = row["step"] if row["source_seq"] is not None else None
    return EventAccount(
        step, row["kind"], event_line(row), row["event_time"], spot(row.place), tuple(texts), tuple(notes)
    )


def _rewards(story: Story, passages: list[Passage], sample: Row[Trajectory] | None) -> tuple[AccountedReward, ...]:
    """Rewards of this trajectory, and those of the whole group."""
    reward_ids = {(one["source"], one["reward_id"]) for one in sample["rewards"]} if sample is not None else set()
    out: list[AccountedReward] = []
    group_passages = [
        p for p in story.passages if p not in passages and p.row is not None and p.row["kind"] == "reward"
    ]
    for passage in [*passages, *group_passages]:
        row = passage.row
        if row is None or row["kind"] != "reward":
            continue
        try:
            body: Reward = row.body
        except SchemaError:
            continue
        if passage in group_passages and (body["target_kind"] != "group" or body["target"] != story.subject.group):
            continue
        fate, detail = _fate(passage, body, reward_ids, is_sealed=sample is not None)
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


def _fate(passage: Passage, body: Reward, reward_ids: set[tuple[str, str]], *, is_sealed: bool) -> tuple[str, str]:
    for letter in passage.letters:
        return letter["reason"], letter["detail"]
    if (body["source"], body["reward_id"]) in reward_ids:
        return "counted", ""
    return (
        ("not counted", "it is no part of the sealed sample")
        if is_sealed
        else ("waits", "its sample is not sealed yet")
    )


def _training(story: Story, row: Row[LedgerEntry], group: TrainedGroup, sample: Row[Trajectory] | None) -> TrainedIn:
    places = {place_of(place) for place in group["trajectories"]}
    rewards = [one["reward"] for one in story.samples if one.place in places and one["reward"] is not None]
    reward = sample["reward"] if sample is not None else None
    advantage = reward - fmean(rewards) if reward is not None and rewards else None
    batch = {
        name: value
        for name, value in sorted(row["metrics"].items())
        if any(part in name for part in BATCH) and not name.startswith(("timings_", "tokens_"))
    }
    place = spot(row.place)
    masked_tokens, eta = row["masked_tokens"], row["eta"]
    return TrainedIn(row["version"], group["seq"], place, group["lost"], eta, masked_tokens, advantage, batch)


def facts(account: Account) -> list[str]:
    """What it belongs to, a line each."""
    lines = [f"task {account.task}, group {account.group}, tenant {account.tenant}, attempt {account.attempt}"]
    if account.place is not None:
        reward = "no reward" if account.reward is None else f"reward {account.reward:.4g}"
        note = f", never judged by {', '.join(account.missing)}" if account.missing else ""
        lines.append(f"sealed as {account.split} sample {account.sample}: {account.status}, {reward}{note}")
        lines[-1] += f"  {account.place}"
    else:
        lines.append("not sealed")
    return lines + [f"left out: {entry.replace(':', ': ', 1)}" for entry in account.excluded]


def training_lines(account: Account) -> list[str]:
    """What trained on it, a line each."""
    out = []
    for one in account.trained:
        line = f"trained version {one.version} (seq {one.seq}, eta {one.eta})"
        if one.lost:
            line += f", as lost: {one.lost}"
        elif one.advantage is not None:
            line += f", reward over its group {one.advantage:+.4g}"
        if one.masked_tokens:
            line += f", {one.masked_tokens} tokens of the batch masked as stale"
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in one.batch.items())
        out.append(f"{line}{'; whole batch: ' if metrics else ''}{metrics}  {one.place}")
    return out
