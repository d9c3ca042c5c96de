"""Which judgements count, and what they come to.

Invariants: the first result of a (target, source, rubric version) in partition order counts, whatever comes later,
unless one names it as superseded before the sample is sealed; a missing or failed judgement is no zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Counted = dict[str, Any]
"""identity -> {reward_id, source, rubric, value, failure, place}"""


class Taken(NamedTuple):
    """What came of one judgement."""

    counted: Counted
    refused: str | None
    """why it does not count"""
    replaced: Mapping[str, Any] | None
    """the entry that it corrects"""


def take(counted: Counted, body: Mapping[str, Any], place: Mapping[str, Any]) -> Taken:
    """Count a Reward body, or say why not."""
    identity = "\x1f".join((body["target_kind"], body["target"], body["source"], body["rubric_version"]))
    entry = {
        "reward_id": body["reward_id"],
        "source": body["source"],
        "rubric": body["rubric_version"],
        "value": body["value"],
        "failure": body["failure"] or (None if body["value"] is not None else "no value"),
        "place": dict(place),
    }
    if any(body["reward_id"] == known["reward_id"] for known in counted.values()):
        return Taken(counted, "duplicate_reward", None)
    if body["supersedes"] is not None:
        for key, known in counted.items():
            if known["reward_id"] == body["supersedes"] and (key == identity or identity not in counted):
                rest = {name: value for name, value in counted.items() if name != key}
                return Taken({**rest, identity: entry}, None, known)
    if identity in counted:
        return Taken(counted, "duplicate_reward", None)
    return Taken({**counted, identity: entry}, None, None)


def sources(*maps: Counted) -> set[str]:
    """Who has spoken."""
    return {entry["source"] for counted in maps for entry in counted.values()}


def silent(awaits: Iterable[str], *maps: Counted) -> list[str]:
    """Awaited sources that have not spoken, sorted."""
    return sorted(set(awaits) - sources(*maps))


def sealed(*maps: Counted) -> list[dict[str, Any]]:
    """SealedReward records of everything that counted, in the order it came."""
    return [
        {
            "reward_id": entry["reward_id"],
            "source": entry["source"],
            "rubric_version": entry["rubric"],
            "value": entry["value"],
            "failure": entry["failure"],
        }
        for counted in maps
        for entry in counted.values()
    ]


def combined(awaits: Iterable[str], *maps: Counted) -> float | None:
    """The sum of all values; None when there is none, or when an awaited source is silent or failed."""
    entries = [entry for counted in maps for entry in counted.values()]
    spoken = {entry["source"] for entry in entries if entry["value"] is not None}
    if not entries or set(awaits) - spoken:
        return None
    values = [float(entry["value"]) for entry in entries if entry["value"] is not None]
    return sum(values) if values else None
