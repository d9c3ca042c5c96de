"""Which trajectories are wanted: plain rules over a sealed trajectory, parsed from flags. Pure.

Invariant: a rule that is not given leaves nothing out; ranges hold both of their ends."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, get_args

from millrace.infra.errors import ExportError
from millrace.schemas.json_values import JsonObject
from millrace.schemas.records import EpisodeStatus, Trajectory

_COMPARE: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
_REWARD = re.compile(r"\s*(>=|<=|==|!=|>|<)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
SPLITS = ("train", "evaluation", "all")
STATUSES: tuple[str, ...] = get_args(EpisodeStatus)
_RANGE = re.compile(r"(\d+)?(\.\.)?(\d+)?")


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Versions `first` to `last`, both included; None is no bound."""

    first: int | None
    last: int | None

    def holds(self, version: int) -> bool:
        """Whether it is one of them."""
        return (self.first is None or version >= self.first) and (self.last is None or version <= self.last)

    def meets(self, head: int, tail: int) -> bool:
        """Whether any version from `head` to `tail` is one of them; -1 is no version."""
        return head >= 0 and (self.last is None or head <= self.last) and (self.first is None or tail >= self.first)


@dataclass(frozen=True, slots=True)
class RewardLimit:
    """What a reward must be, `sign` and `value`; a missing or non-finite one never is."""

    sign: str
    value: float

    def holds(self, reward: float | None) -> bool:
        """Whether a reward is so."""
        return reward is not None and math.isfinite(reward) and _COMPARE[self.sign](reward, self.value)


@dataclass(frozen=True, slots=True)
class Selection:
    """What is wanted. sampled: any trainable token came from one of these versions; trained: one of them trained on it;
    evaluation: evaluation traffic too, which is otherwise left out whatever else is asked; best: of each group, only
    the sample with the highest reward of those that are left."""

    sampled: VersionRange | None = None
    trained: VersionRange | None = None
    tasks: frozenset[str] = frozenset()
    tenants: frozenset[str] = frozenset()
    statuses: frozenset[str] = frozenset()
    rewards: tuple[RewardLimit, ...] = ()
    evaluation: bool = False
    train: bool = True
    best: bool = False

    def leaves_out(self, record: Trajectory, version: int | None) -> str | None:
        """The rule that leaves a trajectory out, None when it is wanted. `version`: the one that trained on it."""
        is_evaluation = record["split"] == "evaluation"
        if is_evaluation and not self.evaluation:
            return "evaluation"
        if not is_evaluation and not self.train:
            return "split"
        if self.tenants and record["tenant"] not in self.tenants:
            return "tenant"
        if self.tasks and record["task_id"] not in self.tasks:
            return "task"
        if self.statuses and record["status"] not in self.statuses:
            return "status"
        if self.sampled is not None and not self.sampled.meets(record["v_head"], record["v_tail"]):
            return "version"
        if self.trained is not None and (version is None or not self.trained.holds(version)):
            return "trained"
        return None if all(limit.holds(record["reward"]) for limit in self.rewards) else "reward"

    def as_json(self) -> JsonObject:
        """As a manifest says it: what is not asked for is not there."""
        fields = asdict(self)
        fields["rewards"] = [f"{limit.sign}{limit.value!r}" for limit in self.rewards]
        switches = {"train", "evaluation"}
        return {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in fields.items()
            if value or name in switches
        }


def versions(text: str) -> VersionRange:
    """`7`, `3..7`, `3..` or `..7`. Raises ExportError for anything else."""
    match = _RANGE.fullmatch(text.strip())
    if not match or not text.strip().strip("."):
        raise ExportError(f"{text!r} is no range of versions: write 7, 3..7, 3.. or ..7")
    first, dots, last = match.groups()
    low = int(first) if first else None
    high = (int(last) if last else None) if dots else low
    if not dots and last:
        raise ExportError(f"{text!r} is no range of versions: write 7, 3..7, 3.. or ..7")
    if low is not None and high is not None and high < low:
        raise ExportError(f"the versions {text} end before they begin: write {high}..{low}")
    return VersionRange(low, high)


def reward(text: str) -> RewardLimit:
    """`>=0.5`, `<1`, `==1`, or a number, which is `==`. Raises ExportError for anything else."""
    match = _REWARD.fullmatch(text)
    if not match:
        raise ExportError(f"{text!r} is no bound of a reward: write for instance '>=0.5', with quotes for the shell")
    return RewardLimit(match[1] or "==", float(match[2]))


def from_flags(
    sampling_range: str,
    training_range: str,
    tasks: Sequence[str],
    tenants: Sequence[str],
    split: str,
    rewards: Sequence[str],
    statuses: Sequence[str],
    *,
    best: bool,
) -> Selection:
    """The selection that flags ask for, empty ones for nothing. Raises ExportError for one that makes no sense."""
    if split not in SPLITS:
        raise ExportError(f"there is no split {split!r}: choose one of {', '.join(SPLITS)}")
    unknown = sorted(set(statuses) - set(STATUSES))
    if unknown:
        raise ExportError(f"no episode ends as {unknown[0]!r}: choose among {', '.join(STATUSES)}")
    return Selection(
        sampled=versions(sampling_range) if sampling_range else None,
        trained=versions(training_range) if training_range else None,
        tasks=frozenset(tasks),
        tenants=frozenset(tenants),
        statuses=frozenset(statuses),
        rewards=tuple(map(reward, rewards)),
        evaluation=split in ("evaluation", "all"),
        train=split in ("train", "all"),
        best=best,
    )
