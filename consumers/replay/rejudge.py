"""`millrace replay reward`: the shell around `reward`: the log, a verifier, and what it came to in words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from millrace.consumers import clearance
from millrace.consumers.replay.reward import Replay, RewardComparison, sealed
from millrace.consumers.replay.selection import Selector
from millrace.consumers.replay.sql_selection import question
from millrace.formats.exports.select import Selection
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.log.history.gaps import whole
from millrace.infra.log.history.kinds import EVALUATIONS, TRAJECTORIES
from millrace.infra.log.history.reader import History
from millrace.infra.log.topics import full_name
from millrace.schemas.records import Trajectory
from millrace.streams.reward.choose import choose, conversations, independent
from millrace.streams.reward.judge import Evaluator, Judge


class RejudgeRequest(NamedTuple):
    """Who judges again. name: of the replay; one that was killed goes on under its name; what_is_left: a
    history that has lost a part is judged as far as it is there."""

    name: str
    verifier: str
    rubric: str
    source: str
    workers: int
    timeout_s: float
    what_is_left: bool = False


def run(
    settings: Settings, asked: RejudgeRequest, selection: Selection, told: Callable[[int, int], None], sql: str = ""
) -> RewardComparison:
    """Judge what is selected of the configured policy's history, and by a query too where one is given. Raises
    RewardError where there is no such verifier, HistoryGone where a part of the history is nowhere, FencedError
    when another process runs the same replay, WarehouseError where the query cannot be asked."""

    def wanted(trajectory: Trajectory) -> bool:
        return selection.leaves_out(trajectory, None) is None

    ask = question(settings, sql, wanted) if sql else None
    reward, store = settings.reward, claims(settings)
    chosen = choose(reward, asked.verifier, workers=asked.workers, timeout_s=asked.timeout_s)
    apart = independent(reward, asked.verifier)
    who = Evaluator(asked.source, chosen.version, asked.rubric, asked.name, independent=apart)
    try:
        with history(settings) as bus:
            events = full_name(settings.namespace, "events")
            key, read = reward.key.get_secret_value(), conversations(chosen, bus, events, store)
            judge = Judge(chosen, who, settings.policy.name, store, key=key, conversations=read)
            past = History(bus, settings.namespace, settings.policy.name, store.resolve)
            if ask is None:
                kinds = [*([TRAJECTORIES] if selection.train else []), *([EVALUATIONS] if selection.evaluation else [])]
                missing = whole(past, *kinds, what_is_left=asked.what_is_left)
                report = asyncio.run(Replay(past, who, judge, told).run(bus, sealed(past, wanted, kinds)))
                report.missing = missing
                return report
            found = ask(Selector(past, clearance.today(settings), settings.policy.tenant, None))
            picked = {(one.id, one.attempt): one.reward for one in found.candidates}
            report = asyncio.run(Replay(past, who, judge, told).run(bus, picked))
            report.left_out = +found.left_out
            return report
    finally:
        chosen.close()


def lines(report: RewardComparison) -> list[str]:
    """What a replay came to, a sentence a line."""
    said = [f"{report.judged} of {report.wanted} trajectories judged"]
    said += [f"without {gone}" for gone in report.missing]
    said += [f"left out {count}: {reason}" for reason, count in report.left_out.most_common()]
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
