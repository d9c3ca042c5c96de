"""The laws that come before all others: topics begin where they may, and what they hold can be read."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.consumers.audit.law import Law
from millrace.infra.log.base import Place, Record
from millrace.infra.log.topics import TOPICS

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
