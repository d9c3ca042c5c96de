"""Which judgements count, and what they come to.

Invariants: the first result of a (target, source, rubric version) in partition order counts, whatever comes later,
unless one of the same source names it as superseded before the sample is sealed; no source can replace, forestall or
crowd out another; where a sample awaits sources, only theirs make up its reward; a missing or failed judgement is no
zero, and neither is a number beyond `bounds.REWARD`."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypedDict

from millrace.schemas import bounds
from millrace.schemas.records import Place, Reward, SealedReward


class Judgement(TypedDict):
    """What is kept of one judgement."""

    reward_id: str
    source: str
    rubric: str
    value: float | None
    failure: str | None
    place: Place


Judgements = dict[str, Judgement]
"""identity -> judgement"""
OUT_OF_BOUNDS = "value out of bounds"
"""the failure of a judgement whose value is not finite or larger than any reward may be"""


class TakeResult(NamedTuple):
    """What came of one judgement."""

    judgements: Judgements
    refusal: str | None
    """why it does not count"""
    former: Judgement | None
    """the entry that it corrects"""


def take(judgements: Judgements, body: Reward, place: Place, awaits: Collection[str] = ()) -> TakeResult:
    """Count a Reward body, or say why not. `awaits`: the sources whose judgements make up the reward."""
    identity = "\x1f".join((body["target_kind"], body["target"], body["source"], body["rubric_version"]))
    entry = _entry(body, place)
    own_entries = {key: former for key, former in judgements.items() if former["source"] == body["source"]}
    if any(body["reward_id"] == former["reward_id"] for former in own_entries.values()):
        return TakeResult(judgements, "duplicate_reward", None)
    if body["supersedes"] is not None:
        for key, former in own_entries.items():
            if former["reward_id"] == body["supersedes"] and (key == identity or identity not in judgements):
                rest = {name: value for name, value in judgements.items() if name != key}
                return TakeResult({**rest, identity: entry}, None, former)
    if identity in judgements:
        return TakeResult(judgements, "duplicate_reward", None)
    # Room is counted apart, so that nobody can fill the room of those who are awaited.
    is_awaited = body["source"] in awaits
    if sum((former["source"] in awaits) == is_awaited for former in judgements.values()) >= bounds.REWARDS:
        return TakeResult(judgements, "too_many_rewards", None)
    return TakeResult({**judgements, identity: entry}, None, None)


def sources(*maps: Judgements) -> set[str]:
    """Who has spoken."""
    return {entry["source"] for judgements in maps for entry in judgements.values()}


def silent_sources(awaits: Collection[str], *maps: Judgements) -> list[str]:
    """Awaited sources that have not spoken, sorted."""
    return sorted(set(awaits) - sources(*maps))


def sealed_rewards(*maps: Judgements) -> list[SealedReward]:
    """SealedReward records of everything that counted, in the order it came."""
    return [
        {
            "reward_id": entry["reward_id"],
            "source": entry["source"],
            "rubric_version": entry["rubric"],
            "value": entry["value"],
            "failure": entry["failure"],
        }
        for judgements in maps
        for entry in judgements.values()
    ]


def combine(awaits: Collection[str], *maps: Judgements, partial: bool = False) -> float | None:
    """The sum of the awaited sources' values, or of all values where no source is awaited.

    None when there is none. None, too, when an awaited source is silent or failed, unless `partial`."""
    pairs = [
        (entry["source"], entry["value"])
        for judgements in maps
        for entry in judgements.values()
        if entry["value"] is not None
    ]
    values = [float(value) for source, value in pairs if not awaits or source in awaits]
    if set(awaits) - {source for source, _ in pairs} and not partial:
        return None
    return sum(values) if values else None


def _entry(body: Reward, place: Place) -> Judgement:
    value = body["value"]
    failure = body["failure"] or (None if value is not None else "no value")
    if value is not None and not -bounds.REWARD <= value <= bounds.REWARD:
        value, failure = None, failure or OUT_OF_BOUNDS
    return {
        "reward_id": body["reward_id"],
        "source": body["source"],
        "rubric": body["rubric_version"],
        "value": value,
        "failure": failure,
        "place": {**place},
    }
