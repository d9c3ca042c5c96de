"""Rewards that are chosen in place of the sealed ones: those of one source and one rubric, by trajectory and attempt.

    SOURCE[/RUBRIC]       what a replay gave
    live:SOURCE[/RUBRIC]  what came live, whatever became of it: counted, late, or refused since another had counted

Invariants: of several judgements of a whole trajectory the newest in the log counts, and one that was sent twice counts
where it came first; a failure, a number beyond `bounds.REWARD`, and what is about a part of a trajectory are no reward
of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from millrace.consumers.replay.selection import BranchCandidate
from millrace.infra.errors import BranchError
from millrace.infra.log.history.kinds import EVENTS
from millrace.infra.log.history.reader import History
from millrace.schemas import bounds
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Reward

LIVE = "live:"

Rewards = Mapping[tuple[str, str], float]
"""by trajectory and attempt"""


@dataclass(frozen=True, slots=True)
class ChosenRewards:
    """source, behind `LIVE` where its rewards came live, and rubric of the evaluator; and what it said where it did not
    fail."""

    source: str
    rubric: str
    values: Rewards


def choose(history: History, text: str) -> ChosenRewards:
    """The rewards that a text names. Raises BranchError where there are none, or where the rubric is not said and there
    are several."""
    live = text.startswith(LIVE)
    source, slash, rubric = text.removeprefix(LIVE).partition("/")
    prefix = LIVE if live else ""
    newest: dict[str, dict[tuple[str, str], float]] = {}
    former = set[tuple[str, str, str]]()
    for row in history.rows(
        EVENTS,
        own=True,
        only=lambda r: r.headers.get("kind") == b"reward",  # the header's source is the log that brought it
    ):
        if row.name != "Event" or row["kind"] != "reward" or row["body_encoding"] != "plain":
            continue
        try:
            reward: Reward = row.body
        except SchemaError:
            continue  # a dead letter of seal's says so
        name = row["trajectory"], row["attempt"], reward["reward_id"]
        if reward["source"] != source or (reward["replay"] is None) is not live or (live and name in former):
            continue
        former.add(name)
        if reward["target_kind"] == "trajectory" and (value := _value(reward)) is not None:
            newest.setdefault(reward["rubric_version"], {})[row["trajectory"], row["attempt"]] = value
    rubrics = sorted(name for name in newest if name == rubric or not slash)
    if len(rubrics) > 1:
        raise BranchError(
            f"{source} judged by the rubrics {', '.join(rubrics)}: choose one, such as {prefix}{source}/{rubrics[-1]}"
        )
    if not rubrics:
        alternatives = f"; {source} judged by {', '.join(sorted(newest))}" if newest else ""
        if live:
            raise BranchError(f"no live reward of {text.removeprefix(LIVE)} can be learned from{alternatives}")
        raise BranchError(
            f"no replay gave rewards of {text}{alternatives}: `millrace replay reward` judges history again, and "
            f"{LIVE}{source} takes the newest that came live"
        )
    return ChosenRewards(prefix + source, rubrics[0], newest[rubrics[0]])


def _value(reward: Reward) -> float | None:
    """What it says, None where that is no reward."""
    value = reward["value"]
    if reward["failure"] is not None or value is None or not -bounds.REWARD <= value <= bounds.REWARD:
        return None
    return value


def with_rewards(candidates: Sequence[BranchCandidate], rewards: Rewards) -> list[BranchCandidate]:
    """The candidates with these rewards in place of the sealed ones, None where there is none."""
    return [replace(one, reward=rewards.get((one.id, one.attempt))) for one in candidates]
