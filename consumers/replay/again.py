"""`millrace replay reward`: the shell around `reward`: the log, a pool of verifiers, and what it came to in words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from millrace.consumers.export.select import Selection
from millrace.consumers.history.reader import History
from millrace.consumers.replay.reward import Again, Replay
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.schemas.records import Trajectory
from millrace.streams.reward.judge import Evaluator, Judge
from millrace.streams.reward.pool import Pool


class Asked(NamedTuple):
    """Who judges again. name: of the replay; one that was killed goes on under its name."""

    name: str
    verifier: str
    rubric: str
    source: str
    workers: int
    timeout_s: float


def run(settings: Settings, asked: Asked, selection: Selection, told: Callable[[int, int], None]) -> Again:
    """Judge what is selected of the configured policy's history. Raises RewardError where there is no such verifier,
    FencedError when another process runs the same replay."""

    def wanted(trajectory: Trajectory) -> bool:
        return selection.leaves_out(trajectory, None) is None

    who = Evaluator(asked.source, asked.verifier, asked.rubric, asked.name)
    store = claims(settings)
    pool = Pool(asked.verifier, workers=asked.workers, timeout_s=asked.timeout_s)
    try:
        with history(settings) as bus:
            judge = Judge(pool, who, settings.policy.name, store, key=settings.reward.key.get_secret_value())
            past = History(bus, settings.namespace, settings.policy.name, store.resolve)
            return asyncio.run(Replay(past, who, judge, told).run(bus, wanted))
    finally:
        pool.close()


def lines(report: Again) -> list[str]:
    """What a replay came to, a sentence a line."""
    said = [f"{report.judged} of {report.wanted} trajectories judged"]
    if report.already:
        said.append(f"{report.already} had been judged by this replay before")
    if report.failed:
        said.append(f"{report.failed} verdicts failed: their rewards say how")
    if report.gone:
        said.append(f"{report.gone} have no end in the log any more: nothing is left to judge")
    if report.both:
        old, new = report.old / report.both, report.new / report.both
        said.append(f"mean reward {old:.3f} when sealed, {new:.3f} now, over {report.both}; {report.changed} differ")
    return said
