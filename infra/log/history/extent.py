"""From where to where the topics of a policy are read, so that nothing that is pointed at lies beyond an end.

Invariants: the end of every topic is taken before that of the topics it points into, and with nothing open before it,
so what a live system appends meanwhile never looks like a hole; those that point at each other inside one transaction
are taken at one moment. What stays open for longer than `PATIENCE_S` is noted: what points behind it may be whole.
"""

from __future__ import annotations

import time

from millrace.infra.log.history.kinds import (
    COMPLETIONS,
    DEAD_LETTERS,
    DECISIONS,
    EVALUATIONS,
    EVENTS,
    GRANTS,
    LEDGER,
    PROMPTS,
    RAW,
    RESOLUTIONS,
    SCORES,
    TRAJECTORIES,
    TURNS,
    WEIGHTS,
)
from millrace.infra.log.history.reader import History

ORDER: tuple[str, ...] = (
    *TURNS,
    SCORES,
    LEDGER,
    WEIGHTS,
    RESOLUTIONS,
    GRANTS,
    COMPLETIONS,
    TRAJECTORIES,
    EVALUATIONS,
    DEAD_LETTERS,
    EVENTS,
    RAW,
    PROMPTS,
    DECISIONS,
)
"""the order in which ends are taken: what points, before what it points at"""
JOINT: tuple[str, ...] = (LEDGER, WEIGHTS, RESOLUTIONS, GRANTS)
"""topics that point at each other inside one transaction"""
LOOK_S = 0.02
PATIENCE_S = 20.0
"""twice as long as a transaction whose owner died stays open"""
MAY_BE_WHOLE = "what is named at the log's end may be whole; audit again"


class Extent:
    """Starts and ends by kind of topic and partition, as they are when it is made; nothing under a kind whose topic
    does not exist. notes: what could not be taken so, or is not there."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.starts: dict[str, dict[int, int]] = {}
        self.ends: dict[str, dict[int, int]] = {}
        self.notes: list[str] = []
        for kind in ORDER[: ORDER.index(JOINT[0])]:
            self._measure(kind)
        self._measure_joint()
        for kind in ORDER[ORDER.index(JOINT[-1]) + 1 :]:
            self._await_decisions(kind)
            self._measure(kind)
        for kind in ORDER:
            self._describe(kind)

    def has_moved(self, kind: str, partition: int) -> bool:
        """Whether anything, decided or not, was written to a partition since its end was taken."""
        return self._history.log_ends(kind).get(partition) != self.ends[kind].get(partition)

    def _measure_joint(self) -> None:
        """The ends of one moment at which nothing was open on any of them: a transaction ends on one partition after
        the other, and must not seem to be half there."""
        until = time.monotonic() + PATIENCE_S
        while True:
            before = {kind: self._history.ends(kind) for kind in JOINT}
            log_ends = {kind: self._history.log_ends(kind) for kind in JOINT}
            for kind in JOINT:
                self._measure(kind)
            if before == log_ends == {kind: self.ends[kind] for kind in JOINT}:
                return
            if time.monotonic() > until:
                self.notes.append(f"transactions on {', '.join(JOINT)} never rested: {MAY_BE_WHOLE}")
                return
            time.sleep(LOOK_S)

    def _await_decisions(self, kind: str) -> None:
        """Wait until what was written before now is decided."""
        log_ends, until = self._history.log_ends(kind), time.monotonic() + PATIENCE_S
        while any(end < log_ends[p] for p, end in self._history.ends(kind).items()):
            if time.monotonic() > until:
                self.notes.append(f"transactions on {kind} stayed open: {MAY_BE_WHOLE}")
                return
            time.sleep(LOOK_S)

    def _measure(self, kind: str) -> None:
        self.ends[kind], self.starts[kind] = self._history.ends(kind), self._history.starts(kind)

    def _describe(self, kind: str) -> None:
        name = self._history.names[kind]
        if not self.starts[kind]:
            self.notes.append(f"{name} does not exist")
        losses = ", ".join(f"{p} from offset {at}" for p, at in sorted(self.starts[kind].items()) if at > 0)
        if losses:
            self.notes.append(f"{name} has lost its beginning to retention; read partition {losses}")
