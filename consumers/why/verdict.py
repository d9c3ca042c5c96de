"""What became of a subject, in one sentence, told from its story. Pure."""

from __future__ import annotations

from millrace.consumers.why.story import Passage, Story
from millrace.infra.log.history.rows import Row
from millrace.schemas.records import Trajectory

LATE = "late_reward"
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
    if passage is not None and (stopped := stopped_at(passage)) is not None:
        return stopped
    if subject.response is not None and (left_out := excluded(story, subject.response)) is not None:
        return f"reply {subject.response} does not train: {left_out}"
    sample = sample_of(story)
    if sample is not None and (reason := untrained(sample)) is not None:
        return reason + too_late(story)
    fate = group_fate(story) + too_late(story)
    if sample is None and subject.trajectory is not None and story.samples:
        return f"its attempt did not become the sample (another ended first, or it never ended); the group {fate}"
    return f"its group {fate}" if subject.kind not in ("group", "ticket") else f"{subject.kind} {subject.id} {fate}"


def passage_of(story: Story) -> Passage | None:
    """The event that the subject names, if it names one."""
    wanted = story.subject.event
    if wanted is None:
        return None
    return next((p for p in story.passages if p.row is not None and p.row["id"] == wanted), None)


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


def excluded(story: Story, response: str) -> str | None:
    """Why a reply is left out of its sample, None when it is in."""
    for sample in story.samples:
        for entry in sample["excluded"]:
            reply, _, reason = entry.rpartition(":")
            if reply in (response, "*"):
                return str(reason)
    return None


def sample_of(story: Story) -> Row[Trajectory] | None:
    """The sealed sample of the subject's attempt."""
    wanted = story.subject.trajectory
    return next((row for row in story.samples if row["id"] == wanted), None) if wanted else None


def untrained(sample: Row[Trajectory]) -> str | None:
    """Why a sealed sample can never train, None when it may."""
    if sample["split"] == "evaluation":
        return f"it was sealed as an evaluation with reward {sample['reward']}, and never trains"
    if sample["reward"] is None:
        return f"it was sealed without a reward ({unjudged(sample)}) and does not train"
    if not sample["tokens"]:
        reasons = {entry.rpartition(":")[2] for entry in sample["excluded"]}
        return f"it was sealed without a trainable token: {', '.join(sorted(reasons)) or 'no call was captured'}"
    return None


def unjudged(sample: Row[Trajectory]) -> str:
    """Why a sample has no reward, by awaited source."""
    failures = {reward["source"]: reward["failure"] for reward in sample["rewards"] if reward["failure"]}
    silent = [f"{source} said nothing in time" for source in sample["missing"] if source not in failures]
    return ", ".join([*(f"{source} failed: {why}" for source, why in failures.items()), *silent]) or "nobody judged it"


def too_late(story: Story) -> str:
    """Says of a sample that rewards came for it after it was sealed; empty when none did."""
    count = sum(letter["reason"] == LATE for passage in story.passages for letter in passage.letters)
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
    trained = list(story.trained())
    if trained:
        row, group = trained[0]
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
        reasons = sorted(filter(None, map(untrained, story.samples)))
        return f"was sealed, and is not fit to train: {'; '.join(dict.fromkeys(reasons)) or 'no sample is good'}"
    if (closed := closed_without_samples(story)) is not None:
        return f"was closed without a sample: {closed}"
    if story.passages:
        return "is not complete yet"
    return "was granted and nobody has answered yet" if story.grants else "has left no trace"
