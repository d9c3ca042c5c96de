"""The law that a batch is a list of places: every place leads to a sample of the group that names it."""

from __future__ import annotations

import math
from typing import NamedTuple

from millrace.consumers.audit.facts import Facts, PlaceIndex
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.rows import Mark, Row, SealedSample
from millrace.infra.log.base import Place
from millrace.infra.log.topics import partition_of
from millrace.schemas.records import Completion, LedgerEntry, Resolution


class _Named(NamedTuple):
    """A record that names the place of one sample."""

    group: str
    what: str
    mark: Mark
    sample: int | None
    tokens: int
    reward: float


class Places(Law):
    """Completions, resolutions and ledger entries name places; each holds a trajectory of that group, all samples of a
    group on the one partition of its key, each in one completion at most, and none that trains in none."""

    name = "places"
    sentence = "places lead to samples of the right group, all on one partition, and what trains is in one completion"
    unit = "places"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._index = PlaceIndex()
        self._named: list[_Named] = []
        self._gone = 0

    def ledger(self, row: Row[LedgerEntry]) -> None:
        if row["version"] in self.facts.selected:
            return  # the law about tiles looks at the places of a selection
        for group in row["groups"]:
            if group["lost"] is None:
                for place in group["trajectories"]:
                    where = Place(place["topic"], place["partition"], place["offset"])
                    self._add(where, _Named(group["group"], f"version {row['version']}", row.mark, None, -1, math.nan))

    def resolution(self, row: Row[Resolution]) -> None:
        if row["kind"] != "setting":
            self._group(row, f"the {row['kind']} resolution", None)

    def completion(self, row: Row[Completion]) -> None:
        if row["kind"] in ("complete", "short", "unsolicited"):
            self._group(row, "the completion", row["samples"])

    def _group(self, row: Row[Completion] | Row[Resolution], what: str, samples: list[int] | None) -> None:
        places, group = row.places(), row["group"]
        if {len(row["tokens"]), len(row["rewards"])} != {len(places)}:
            self.fail(f"{what} of a group does not list tokens and rewards of each sample", row, group=group)
            return
        if len(set(places)) != len(places):
            self.fail(f"{what} of a group names a place twice", row, group=group)
        if len({place.partition for place in places}) > 1:
            self.fail(f"{what} of a group names samples on several partitions", row, group=group)
        for at, place in enumerate(places):
            sample = samples[at] if samples is not None else None
            self._add(place, _Named(group, what, row.mark, sample, row["tokens"][at], _number(row["rewards"][at])))

    def _add(self, place: Place, named: _Named) -> None:
        self.finding.checked += 1
        if place.topic != self.facts.topics["trajectories"]:
            self.fail(f"{named.what} of a group names a place in {place.topic}", named.mark, place, group=named.group)
        elif self.facts.gone("trajectories", place):
            self._gone += 1
        else:
            self._index.add(place, len(self._named))
            self._named.append(named)

    def trajectory(self, sample: SealedSample) -> None:
        row = sample.row
        count = len(self.facts.starts["trajectories"])
        if row.place.partition != partition_of(row["group"], count):
            self.fail("a trajectory lies on another partition than its group's", row, **sample.ids)
        completions = trained = 0
        for at in self._index.take(row.place):
            named = self._named[at]
            completions += named.what == "the completion"
            trained += named.what.startswith("version")
            if named.group != row["group"]:
                message = f"{named.what} of group {named.group} names a sample of group {row['group']}"
                self.fail(message, named.mark, row, **sample.ids)
            elif named.sample is not None and named.sample != row["sample"]:
                message = f"{named.what} says sample {named.sample} where sample {row['sample']} lies"
                self.fail(message, named.mark, row, **sample.ids)
            elif named.tokens >= 0 and (named.tokens, repr(named.reward)) != (
                row["length"],
                repr(_number(row["reward"])),
            ):
                message = (
                    f"{named.what} says {named.tokens} tokens and reward {named.reward} "
                    f"of a sample with {row['length']} and {row['reward']}"
                )
                self.fail(message, named.mark, row, **sample.ids)
        if completions > 1 or (trained and not completions and self.facts.begins_at_zero("completions")):
            verb = "trains and " if trained else ""
            self.fail(f"a trajectory {verb}is named by {completions} completions", row, **sample.ids)

    def finish(self) -> None:
        for partition, offset, at in self._index.unseen():
            named = self._named[at]
            place = Place(self.facts.topics["trajectories"], partition, offset)
            message = f"{named.what} of group {named.group} names a place where no trajectory lies"
            self.fail(message, named.mark, place, group=named.group)
        if self._gone:
            self.note(f"{self._gone} places lie where retention has taken the trajectories")


def _number(value: float | None) -> float:
    """A missing reward is NaN in lists of numbers."""
    return math.nan if value is None else value
