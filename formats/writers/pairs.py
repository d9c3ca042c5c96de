"""Two samples of a group as a preference: the highest reward over the lowest. Pure.

Invariants: both answer the same prompt, or there is no pair; equal rewards are no preference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millrace.dialects.dialogue import Unsayable
from millrace.formats.sample import ExportedSample
from millrace.formats.writers.base import Turn


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """What was asked, and the two ways in which it went on."""

    best: ExportedSample
    worst: ExportedSample
    prompt: list[dict[str, Any]]
    chosen: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def paired(samples: Sequence[ExportedSample], refuse: Turn) -> PreferencePair | None:
    """The pair of a group; None where there is none, and then every sample of it is refused. Those between the best and
    the worst are refused as `not_in_pair`."""
    said: list[tuple[float, ExportedSample, _Told]] = []
    for sample in samples:
        try:
            said.append((sample.judged(), sample, _told(sample)))
        except Unsayable as error:
            refuse(sample, error)
    best, worst = max(said, key=_reward, default=None), min(said, key=_reward, default=None)
    if best is None or worst is None or best[0] == worst[0]:
        _all(said, refuse, Unsayable("no_pair", "its group holds no two different rewards"))
        return None
    if best[2].prompt != worst[2].prompt:
        _all(said, refuse, Unsayable("other_prompt", "the best and the worst of its group were asked otherwise"))
        return None
    for _, sample, _ in said:
        if sample is not best[1] and sample is not worst[1]:
            refuse(sample, Unsayable("not_in_pair", "it is neither the best nor the worst of its group"))
    return PreferencePair(best[1], worst[1], best[2].prompt, best[2].reply, worst[2].reply, best[2].tools)


@dataclass(frozen=True, slots=True)
class _Told:
    prompt: list[dict[str, Any]]
    reply: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def _reward(one: tuple[float, ExportedSample, _Told]) -> float:
    return one[0]


def _told(sample: ExportedSample) -> _Told:
    """The one conversation of a sample, parted where the policy first spoke."""
    if len(sample.dialogues) > 1:
        raise Unsayable("several_lineages", f"it has {len(sample.dialogues)} lineages, and a pair compares one")
    (calls,) = sample.dialogues.values()
    prompt, whole = calls[0].messages, calls[-1].whole
    if whole[: len(prompt)] != prompt:
        raise Unsayable("rewritten", "its agent rewrote what it had asked first")
    return _Told(prompt, whole[len(prompt) :], calls[-1].tools)


def _all(said: Sequence[tuple[float, ExportedSample, _Told]], refuse: Turn, error: Unsayable) -> None:
    for _, sample, _ in said:
        refuse(sample, error)
