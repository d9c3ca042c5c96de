"""Which versions are trained again, and from where: the nearest version whose files are kept.

Invariant: a version can be proven when its parent is kept or can itself be proven, and nothing that it was trained on
is gone. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from millrace.infra.errors import ConfigError, ProofError

ALL_VERSIONS = "all"
_RANGE = re.compile(r"([0-9]{1,18})(?:\.\.([0-9]{1,18}))?")


@dataclass(frozen=True, slots=True)
class Plan:
    """Train versions `start` + 1 up to `last` again; the report is about those from `first` on."""

    start: int
    first: int
    last: int

    @property
    def steps(self) -> range:
        """The versions that are trained."""
        return range(self.start + 1, self.last + 1)

    @property
    def on_the_way(self) -> range:
        """Those of them that nobody asked for."""
        return range(self.start + 1, self.first)


def number_range(text: str, newest: int) -> tuple[int, int]:
    """First and last version of `12`, `10..20` or `all`. Raises ConfigError for any other text, ProofError for versions
    that were never trained."""
    if newest < 1:
        raise ProofError("no version was trained yet: version 0 was given, not trained, so there is nothing to prove")
    if text == ALL_VERSIONS:
        return 1, newest
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"versions {text!r}: write one version (12), a range (10..20) or all")
    first = int(match[1])
    last = int(match[2] or first)
    if first > last:
        raise ConfigError(f"versions {text}: the first one is above the last one; write {last}..{first}")
    if first == 0:
        raise ProofError(f"version 0 was given, not trained: prove 1..{max(last, 1)}")
    if last > newest:
        raise ProofError(f"version {last} does not exist yet: the newest is {newest}")
    return first, last


def provable(newest: int, starts: Collection[int], holes: Collection[int]) -> set[int]:
    """The versions that can be proven. kept: those whose files are there; gone: those whose samples are not."""
    versions: set[int] = set()
    for version in range(1, newest + 1):
        parent = version - 1
        if version not in holes and (parent in starts or parent in versions):
            versions.add(version)
    return versions


def plan(first: int, last: int, newest: int, starts: Collection[int], holes: Collection[int]) -> Plan:
    """How to prove versions `first` to `last`. Raises ProofError, with what can be proven, where not all of them can
    be."""
    candidates = provable(newest, starts, holes)
    missing = [version for version in range(first, last + 1) if version not in candidates]
    if missing:
        version = missing[0]
        start = max((number for number in starts if number < version), default=-1)
        gaps = [number for number in range(start + 1, version + 1) if number in holes]
        if start < 0:
            why = f"no version before {version} has its files any more"
        else:
            why = f"samples of version {gaps[0]} are gone from the log, and version {start} is the nearest one kept"
        raise ProofError(
            f"version {version} cannot be proven: {why}. "
            + (f"{version_text(candidates)} can be proven" if candidates else "No version can be proven")
            + "; [learner] keep_every keeps more versions, [topics] long_hours keeps samples longer"
        )
    return Plan(max(number for number in starts if number < first), first, last)


def version_text(numbers: Collection[int]) -> str:
    """Versions as a sentence begins with them: Version 7, Versions 1..3, 7."""
    return f"Version{'s' if len(set(numbers)) > 1 else ''} {spans(numbers)}"


def spans(numbers: Iterable[int]) -> str:
    """Numbers as people write them: 1..3, 7, 9..12."""
    stretches: list[list[int]] = []
    for number in sorted(numbers):
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1][1:] = [number]
        else:
            stretches.append([number])
    return ", ".join("..".join(map(str, stretch)) for stretch in stretches)
