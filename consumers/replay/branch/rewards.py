"""Rewards that a replay gave: those of one evaluator and one rubric, by trajectory and attempt.

Invariant: of several replays of the same evaluator and rubric, the newest word in the log counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from millrace.consumers.history.kinds import EVENTS
from millrace.consumers.history.reader import History
from millrace.consumers.replay.selection import Candidate
from millrace.infra.errors import BranchError
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Reward

Rewards = Mapping[tuple[str, str], float]
"""by trajectory and attempt"""


@dataclass(frozen=True, slots=True)
class Chosen:
    """source and rubric of the evaluator, and what it said where it did not fail."""

    source: str
    rubric: str
    values: Rewards


def chosen(history: History, text: str) -> Chosen:
    """The rewards of `SOURCE` or `SOURCE/RUBRIC`. Raises BranchError where no replay gave any, or where the rubric is
    not said and there are several."""
    source, slash, rubric = text.partition("/")
    found: dict[str, dict[tuple[str, str], float]] = {}
    rows = history.rows(
        EVENTS,
        own=True,
        only=lambda r: r.headers.get("kind") == b"reward" and r.headers.get("source") == source.encode(),
    )
    for row in rows:
        if row.name != "Event" or row["kind"] != "reward" or row["body_encoding"] != "plain":
            continue
        try:
            reward: Reward = row.body
        except SchemaError:
            continue  # a dead letter of seal's says so
        value = reward["value"]
        if reward["replay"] is None or reward["failure"] is not None or value is None or not math.isfinite(value):
            continue
        found.setdefault(reward["rubric_version"], {})[row["trajectory"], row["attempt"]] = value
    wanted = sorted(name for name in found if name == rubric or not slash)
    if len(wanted) > 1:
        raise BranchError(
            f"{source} judged by the rubrics {', '.join(wanted)}: choose one, such as {source}/{wanted[-1]}"
        )
    if not wanted:
        other = f"; {source} judged by {', '.join(sorted(found))}" if found else ""
        raise BranchError(f"no replay gave rewards of {text}{other}: `millrace replay reward` judges history again")
    return Chosen(source, wanted[0], found[wanted[0]])


def rewarded(candidates: Sequence[Candidate], rewards: Rewards) -> list[Candidate]:
    """The candidates with these rewards in place of the sealed ones, None where there is none."""
    return [replace(one, reward=rewards.get((one.id, one.attempt))) for one in candidates]
