"""Laws about all records: topics begin where they may, what they hold can be read, every place leads to a sample of the
group that names it, and no slot's time falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from millrace.consumers.audit.facts import Facts, PlaceIndex
from millrace.consumers.audit.law import Law, SealedSample
from millrace.infra.log.base import Place, Record
from millrace.infra.log.history.rows import Mark, Row
from millrace.infra.log.topics import TOPICS, partition_of
from millrace.schemas.records import Completion, Grant, LedgerEntry, Resolution, Turn, WeightVersion

ENDLESS = frozenset(topic.name.removeprefix("{policy}.") for topic in TOPICS if topic.cleanup == "all")
"""kinds of topic that retention never takes"""
BLIND: Mapping[str, str] = {
    "raw": "whether the events of what was captured there are those that were captured",
    "events": "the calls of the oldest samples, and the links of the chain up to there",
    "dead-letters": "what became of the raw events whose letters lay there",
    "prompts": "the tasks of the oldest grants",
    "grants": "the terms of the oldest groups",
    "trajectories": "the samples that the oldest versions were trained on",
    "evaluations": "what the oldest scores rest on",
    "completions": "the completions of the oldest groups",
    "resolutions": "the order, the tickets and the settings of the oldest groups",
    "turns.refine": "the turns of refine up to there; none of its later ones is folded again",
    "turns.seal": "the turns of seal up to there; none of its later ones is folded again",
    "turns.dispatch": "the turns of dispatch up to there; none of its later ones is folded again",
}
"""by kind: what nobody can check without the beginning of that topic"""


class Beginnings(Law):
    """What retention never takes begins at offset 0. Every other topic may have lost its beginning, and the report then
    says where it begins and what was therefore not checked."""

    name = "beginnings"
    sentence = "weights, ledger, scores and decisions, which retention never takes, still have their first records"
    unit = "partitions"

    def finish(self) -> None:
        for kind, starts in self.facts.starts.items():
            self.finding.checked += len(starts)
            for partition, start in sorted(starts.items()):
                place = Place(self.facts.topics[kind], partition, start)
                if start > 0 and kind in ENDLESS:
                    self.fail(f"{kind} has lost its records before offset {start}, and nothing may take them", place)
                elif start > 0:
                    where = f"{place.topic}[{partition}] begins at offset {start}"
                    self.note(f"{where}; not checked: {BLIND[kind]}")


class Records(Law):
    """Bad bytes are expected in raw, where anyone may write, and end there as dead letters; nowhere else."""

    name = "records"
    sentence = "every record decodes as what its topic holds (raw excepted: bad bytes end as dead letters)"

    def record(self, kind: str, record: Record) -> None:
        self.finding.checked += 1

    def unreadable(self, kind: str, record: Record, error: str) -> None:
        if kind != "raw":
            self.fail(f"a record of {kind} cannot be read: {error}", record.place)


class _PlaceUse(NamedTuple):
    """A record that names the place of one sample."""

    group: str
    source: str
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
        self._named: list[_PlaceUse] = []
        self._gone = 0

    def ledger(self, row: Row[LedgerEntry]) -> None:
        if row["version"] in self.facts.selected:
            return  # the law about tiles looks at the places of a selection
        for group in row["groups"]:
            if group["lost"] is None:
                for place in group["trajectories"]:
                    where = Place(place["topic"], place["partition"], place["offset"])
                    self._add(
                        where, _PlaceUse(group["group"], f"version {row['version']}", row.mark, None, -1, math.nan)
                    )

    def resolution(self, row: Row[Resolution]) -> None:
        if row["kind"] != "setting":
            self._group(row, f"the {row['kind']} resolution", None)

    def completion(self, row: Row[Completion]) -> None:
        if row["kind"] in ("complete", "short", "unsolicited"):
            self._group(row, "the completion", row["samples"])

    def _group(self, row: Row[Completion] | Row[Resolution], source: str, samples: list[int] | None) -> None:
        places, group = row.places(), row["group"]
        if {len(row["tokens"]), len(row["rewards"])} != {len(places)}:
            self.fail(f"{source} of a group does not list tokens and rewards of each sample", row, group=group)
            return
        if len(set(places)) != len(places):
            self.fail(f"{source} of a group names a place twice", row, group=group)
        if len({place.partition for place in places}) > 1:
            self.fail(f"{source} of a group names samples on several partitions", row, group=group)
        for at, place in enumerate(places):
            sample = samples[at] if samples is not None else None
            self._add(place, _PlaceUse(group, source, row.mark, sample, row["tokens"][at], _number(row["rewards"][at])))

    def _add(self, place: Place, use: _PlaceUse) -> None:
        self.finding.checked += 1
        if place.topic != self.facts.topics["trajectories"]:
            self.fail(
                f"{use.source} of a group names a place in {place.topic}",
                use.mark,
                place,
                group=use.group,
            )
        elif self.facts.is_gone("trajectories", place):
            self._gone += 1
        else:
            self._index.add(place, len(self._named))
            self._named.append(use)

    def trajectory(self, sample: SealedSample) -> None:
        row = sample.row
        count = len(self.facts.starts["trajectories"])
        if row.place.partition != partition_of(row["group"], count):
            self.fail("a trajectory lies on another partition than its group's", row, **sample.ids)
        completions = trainings = 0
        for at in self._index.take(row.place):
            use = self._named[at]
            completions += use.source == "the completion"
            trainings += use.source.startswith("version")
            if use.group != row["group"]:
                message = f"{use.source} of group {use.group} names a sample of group {row['group']}"
                self.fail(message, use.mark, row, **sample.ids)
            elif use.sample is not None and use.sample != row["sample"]:
                message = f"{use.source} says sample {use.sample} where sample {row['sample']} lies"
                self.fail(message, use.mark, row, **sample.ids)
            elif use.tokens >= 0 and (use.tokens, repr(use.reward)) != (
                row["length"],
                repr(_number(row["reward"])),
            ):
                message = (
                    f"{use.source} says {use.tokens} tokens and reward {use.reward} "
                    f"of a sample with {row['length']} and {row['reward']}"
                )
                self.fail(message, use.mark, row, **sample.ids)
        if completions > 1 or (trainings and not completions and self.facts.begins_at_zero("completions")):
            verb = "trains and " if trainings else ""
            self.fail(f"a trajectory {verb}is named by {completions} completions", row, **sample.ids)

    def finish(self) -> None:
        for partition, offset, at in self._index.unseen():
            use = self._named[at]
            place = Place(self.facts.topics["trajectories"], partition, offset)
            message = f"{use.source} of group {use.group} names a place where no trajectory lies"
            self.fail(message, use.mark, place, group=use.group)
        if self._gone:
            self.note(f"{self._gone} places lie where retention has taken the trajectories")


def _number(value: float | None) -> float:
    """A missing reward is NaN in lists of numbers."""
    return math.nan if value is None else value


class Times(Law):
    """Log time is refine's clock, passed on from stage to stage: it rises within each slot of each stage, and so do the
    times of versions and of what dispatch writes."""

    name = "times"
    sentence = "time never falls within a slot, nor from version to version"
    unit = "times"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._last: dict[tuple[str, int], tuple[int, Mark]] = {}

    def _see(self, series: str, lane: int, time: int, row: Row) -> None:
        self.finding.checked += 1
        last = self._last.get((series, lane))
        if last is not None and time < last[0]:
            self.fail(f"the time of {series} falls by {last[0] - time} µs", last[1], row)
        if last is None or time > last[0]:
            self._last[series, lane] = (time, row.mark)

    def weights(self, row: Row[WeightVersion]) -> None:
        self._see("weights", 0, row["time"], row)

    def ledger(self, row: Row[LedgerEntry]) -> None:
        self._see("ledger", 0, row["time"], row)

    def resolution(self, row: Row[Resolution]) -> None:
        self._see("resolutions", 0, row["time"], row)

    def grant(self, row: Row[Grant]) -> None:
        self._see("grants", row.place.partition, row["time"], row)

    def completion(self, row: Row[Completion]) -> None:
        self._see("completions of seal's slot", row["slot"], row["time"], row)

    def turn(self, row: Row[Turn]) -> None:
        self._see(f"turns of {row['stage']}", row["slot"], row["now"], row)

    def event(self, row: Row) -> None:
        time = row["time"] if row.name == "Progress" else row["log_time"]
        if time is None:
            self.fail("an event has no log time", row, event=row["id"])
        else:
            self._see("events", row.place.partition, time, row)
