"""Every record about a subject: its events as captured and as governed, what was sealed, resolved and trained; and what
became of it, in one sentence. Pure but for `tell`, which reads.

Invariant: a story holds all records of the subject's group, so that what became of one event can be told from what
became of its sample, and of that from its group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from millrace.consumers.tell.subject import NUMBER, Subject
from millrace.consumers.tell.topics import PolicyTopics, id_bytes
from millrace.infra.log.base import Place, Record
from millrace.infra.log.history.kinds import COMPLETIONS, DEAD_LETTERS, EVENTS, GRANTS, LEDGER, RAW, RESOLUTIONS
from millrace.infra.log.history.rows import Row, place_of
from millrace.infra.log.topics import partition_of
from millrace.schemas.records import (
    Completion,
    DeadLetter,
    Event,
    Grant,
    LedgerEntry,
    Resolution,
    TrainedGroup,
    Trajectory,
)


@dataclass(slots=True)
class Passage:
    """One captured event on its way: raw record, governed event, dead letters about either."""

    raw: Row[Event] | None
    event: Row[Event] | None = None
    raw_place: Place | None = None
    letters: list[Row[DeadLetter]] = field(default_factory=list)

    @property
    def row(self) -> Row[Event] | None:
        """The event as far as it can be read, the governed one first."""
        return self.event or self.raw


@dataclass(slots=True)
class Story:
    """The records of one subject, each list in log order."""

    subject: Subject
    passages: list[Passage] = field(default_factory=list)
    grants: list[Row[Grant]] = field(default_factory=list)
    samples: list[Row[Trajectory]] = field(default_factory=list)
    completions: list[Row[Completion]] = field(default_factory=list)
    resolutions: list[Row[Resolution]] = field(default_factory=list)
    ledger: list[Row[LedgerEntry]] = field(default_factory=list)
    letters: list[Row[DeadLetter]] = field(default_factory=list)
    """dead letters about what is no event"""

    @property
    def ticket(self) -> int | None:
        """The group's ticket, whoever names it."""
        tickets = [row["ticket"] for row in self.resolutions]
        tickets += [row["ticket"] for row in self.completions]
        tickets += [row["ticket"] for row in self.samples]
        return next((ticket for ticket in tickets if ticket is not None), self.subject.ticket)

    @property
    def resolution(self) -> Row[Resolution] | None:
        return self.resolutions[-1] if self.resolutions else None

    def training(self) -> Iterator[tuple[Row[LedgerEntry], TrainedGroup]]:
        """Ledger entries with the group inside."""
        for row in self.ledger:
            for group in row["groups"]:
                if self._is_ours(group):
                    yield row, group

    def _is_ours(self, group: TrainedGroup) -> bool:
        return group["group"] == self.subject.group if self.subject.group else group["ticket"] == self.ticket


def tell(topics: PolicyTopics, subject: Subject) -> Story:
    """Collect the story of a subject."""
    story = Story(subject)
    if subject.key is not None:
        story.passages = _passages(topics, subject.key)
    _letters(topics, story)
    group = subject.group
    if group is not None:
        story.samples = list(topics.samples(group))
        story.completions = [r for r in topics.rows(COMPLETIONS) if r["group"] == group]
    for row in topics.rows(RESOLUTIONS):
        if (group and row["group"] == group) or (row["ticket"] is not None and row["ticket"] == story.ticket):
            story.resolutions.append(row)
    if story.ticket is None and group is not None and NUMBER.fullmatch(group):
        story.subject = subject = _with_ticket(subject, int(group))
    if (ticket := story.ticket) is not None:
        story.grants = [row for row in topics.rows(GRANTS) if row["ticket"] == ticket]
    if any(row["kind"] == "ready" for row in story.resolutions):
        story.ledger = [row for row in topics.rows(LEDGER) if any(map(story._is_ours, row["groups"]))]
    return story


def _with_ticket(subject: Subject, ticket: int) -> Subject:
    """A rollout's group is called after its ticket."""
    return replace(subject, ticket=ticket)


def _passages(topics: PolicyTopics, key: str) -> list[Passage]:
    """Raw and governed events of a key, matched by the place that the governed one names.

    Groups of another policy may have the same key. What another policy said in an episode of this one is part of it:
    every kind of event but a model's call is of the policy of its episode."""
    value = id_bytes(key)

    def has_key(record: Record) -> bool:
        return record.key == value

    passages: dict[Place, Passage] = {}
    if count := topics.count(RAW):
        for record in topics.records(RAW, partition_of(value, count), own=False):
            if has_key(record):
                row, policy = topics.row(record), record.headers.get("policy", topics.policy.encode())
                if row is not None or policy == topics.policy.encode():
                    passages[record.place] = Passage(row, raw_place=record.place)
    if count := topics.count(EVENTS):
        for row in topics.rows(EVENTS, partition_of(value, count), has_key, own=False):
            if row.name == "Event" and row["source_place"] is not None:
                place = place_of(row["source_place"])
                passages.setdefault(place, Passage(None, raw_place=place)).event = row
    in_order = [passages[place] for place in sorted(passages)]
    rows = [passage.row for passage in in_order if passage.row is not None]
    trajectories = {row["root_trajectory"] for row in rows if _is_ours(row, topics) and row["kind"] != "model_call"}
    return [p for p in in_order if p.row is None or _is_ours(p.row, topics) or p.row["root_trajectory"] in trajectories]


def _is_ours(row: Row[Event], topics: PolicyTopics) -> bool:
    """Whether an event is of the policy that the topics are read for."""
    return bool(row.record.get("policy", topics.policy) == topics.policy)


def _letters(topics: PolicyTopics, story: Story) -> None:
    """Dead letters to the event they are about, or to the story when they are about another record of the group."""
    by_place: dict[Place, Passage] = {}
    for passage in story.passages:
        if passage.raw_place is not None:
            by_place[passage.raw_place] = passage
        if passage.event is not None:
            by_place[passage.event.place] = passage
    for row in topics.rows(DEAD_LETTERS):
        target = by_place.get(place_of(row["place"]))
        if target is not None:
            target.letters.append(row)
        elif story.subject.group is not None and row["group"] == story.subject.group:
            story.letters.append(row)


LATE_REWARD = "late_reward"
"""reason of seal's letter about a reward that came after its sample was sealed"""
NEGATIVE = {
    "rejected": "was rejected",
    "failed": "failed",
    "expired": "expired",
    "stale": "was too old when it was complete",
    "declined": "was declined for online learning",
}


def verdict(story: Story) -> str:
    """One sentence, most specific first: what stopped the event, else its sample, else its group."""
    subject = story.subject
    if subject.kind == "prompt":
        count = len(subject.tickets)
        return f"prompt {subject.id} was granted {count} time{'s' * (count != 1)}" if count else "still in line"
    passage = passage_of(story)
    if passage is not None and (stop := stopped_at(passage)) is not None:
        return stop
    if subject.response is not None and (left_out := exclusion_reason(story, subject.response)) is not None:
        return f"reply {subject.response} does not train: {left_out}"
    sample = sample_of(story)
    if sample is not None and (reason := no_training_reason(sample)) is not None:
        return reason + too_late(story)
    fate = group_fate(story) + too_late(story)
    if sample is None and subject.trajectory is not None and story.samples:
        return f"its attempt did not become the sample (another ended first, or it never ended); the group {fate}"
    return f"its group {fate}" if subject.kind not in ("group", "ticket") else f"{subject.kind} {subject.id} {fate}"


def passage_of(story: Story) -> Passage | None:
    """The event that the subject names, if it names one."""
    event_id = story.subject.event
    if event_id is None:
        return None
    return next((p for p in story.passages if p.row is not None and p.row["id"] == event_id), None)


def stopped_at(passage: Passage) -> str | None:
    """What kept an event from going on, None when nothing did."""
    for letter in passage.letters:
        return f"{letter['stage']} refused it: {letter['reason']} ({letter['detail']})"
    if passage.event is None:
        return "captured, and not yet refined"
    governance = passage.event["governance"]
    if governance and governance["eligibility"] in ("denied", "audit_only"):
        return f"it is kept for audit only and never trains: {governance['reason']}"
    return None


def exclusion_reason(story: Story, response: str) -> str | None:
    """Why a reply is left out of its sample, None when it is in."""
    for sample in story.samples:
        for entry in sample["excluded"]:
            reply, _, reason = entry.rpartition(":")
            if reply in (response, "*"):
                return str(reason)
    return None


def sample_of(story: Story) -> Row[Trajectory] | None:
    """The sealed sample of the subject's attempt."""
    trajectory = story.subject.trajectory
    return next((row for row in story.samples if row["id"] == trajectory), None) if trajectory else None


def no_training_reason(sample: Row[Trajectory]) -> str | None:
    """Why a sealed sample can never train, None when it may."""
    if sample["split"] == "evaluation":
        return f"it was sealed as an evaluation with reward {sample['reward']}, and never trains"
    if sample["reward"] is None:
        return f"it was sealed without a reward ({no_reward_reason(sample)}) and does not train"
    if not sample["tokens"]:
        reasons = {entry.rpartition(":")[2] for entry in sample["excluded"]}
        return f"it was sealed without a trainable token: {', '.join(sorted(reasons)) or 'no call was captured'}"
    return None


def no_reward_reason(sample: Row[Trajectory]) -> str:
    """Why a sample has no reward, by awaited source."""
    failures = {reward["source"]: reward["failure"] for reward in sample["rewards"] if reward["failure"]}
    silences = [f"{source} said nothing in time" for source in sample["missing"] if source not in failures]
    return (
        ", ".join([*(f"{source} failed: {why}" for source, why in failures.items()), *silences]) or "nobody judged it"
    )


def too_late(story: Story) -> str:
    """Says of a sample that rewards came for it after it was sealed; empty when none did."""
    count = sum(letter["reason"] == LATE_REWARD for passage in story.passages for letter in passage.letters)
    return f"; {count} reward{'s' * (count != 1)} came after it was sealed and changed nothing" if count else ""


def closed_without_samples(story: Story) -> str | None:
    """Why a group that was closed left no sample: the letters of seal about where its attempts began."""
    for passage in story.passages:
        if passage.row is not None and passage.row["kind"] == "episode_started":
            for letter in passage.letters:
                if letter["stage"] == "seal":
                    return f"{letter['reason']} ({letter['detail']})"
    return None


def group_fate(story: Story) -> str:
    """What became of the group."""
    training = list(story.training())
    if training:
        row, group = training[0]
        if group["lost"]:
            return f"was consumed by version {row['version']} as lost: {group['lost']}"
        return f"trained version {row['version']} (from version {row['version'] - 1}, seq {group['seq']})"
    resolution = story.resolution
    if resolution is not None and resolution["kind"] == "ready":
        return f"is ready with seq {resolution['seq']} and waits for its batch"
    if resolution is not None:
        reason = f": {resolution['reason']}" if resolution["reason"] else ""
        return f"{NEGATIVE.get(resolution['kind'], resolution['kind'])}{reason}"
    if story.samples and all(row["split"] == "evaluation" for row in story.samples):
        return "is evaluation traffic and never trains"
    if story.completions:
        return f"is {story.completions[-1]['kind'].replace('_', '-')} and waits for dispatch"
    if story.samples:
        reasons = sorted(filter(None, map(no_training_reason, story.samples)))
        return f"was sealed, and is not fit to train: {'; '.join(dict.fromkeys(reasons)) or 'no sample is good'}"
    if (closure := closed_without_samples(story)) is not None:
        return f"was closed without a sample: {closure}"
    if story.passages:
        return "is not complete yet"
    return "was granted and nobody has answered yet" if story.grants else "has left no trace"
