"""`millrace replay reward`: the shell around `reward`: the log, a verifier, and what it came to in words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from millrace.consumers import clearance
from millrace.consumers.replay.reward import Replay, RewardComparison, sealed_rewards
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
    settings: Settings, request: RejudgeRequest, selection: Selection, watch: Callable[[int, int], None], sql: str = ""
) -> RewardComparison:
    """Judge what is selected of the configured policy's history, and by a query too where one is given. Raises
    RewardError where there is no such verifier, HistoryGone where a part of the history is nowhere, FencedError
    when another process runs the same replay, WarehouseError where the query cannot be asked."""

    def wanted(trajectory: Trajectory) -> bool:
        return selection.leaves_out(trajectory, None) is None

    ask = question(settings, sql, wanted) if sql else None
    reward, store = settings.reward, claims(settings)
    verifier = choose(reward, request.verifier, workers=request.workers, timeout_s=request.timeout_s)
    apart = independent(reward, request.verifier)
    evaluator = Evaluator(request.source, verifier.version, request.rubric, request.name, independent=apart)
    try:
        with history(settings) as bus:
            events = full_name(settings.namespace, "events")
            key, read = reward.key.get_secret_value(), conversations(verifier, bus, events, store)
            judge = Judge(verifier, evaluator, settings.policy.name, store, key=key, conversations=read)
            past = History(bus, settings.namespace, settings.policy.name, store.resolve)
            if ask is None:
                kinds = [*([TRAJECTORIES] if selection.train else []), *([EVALUATIONS] if selection.evaluation else [])]
                missing = whole(past, *kinds, what_is_left=request.what_is_left)
                report = asyncio.run(
                    Replay(past, evaluator, judge, watch).run(bus, sealed_rewards(past, wanted, kinds))
                )
                report.missing = missing
                return report
            answer = ask(Selector(past, clearance.today(settings), settings.policy.tenant, None))
            rewards = {(one.id, one.attempt): one.reward for one in answer.candidates}
            report = asyncio.run(Replay(past, evaluator, judge, watch).run(bus, rewards))
            report.left_out = +answer.left_out
            return report
    finally:
        verifier.close()


def lines(report: RewardComparison) -> list[str]:
    """What a replay came to, a sentence a line."""
    out = [f"{report.verdicts} of {report.trajectories} trajectories judged"]
    out += [f"without {gone}" for gone in report.missing]
    out += [f"left out {count}: {reason}" for reason, count in report.left_out.most_common()]
    if report.repeats:
        out.append(f"{report.repeats} had been judged by this replay before")
    if report.failures:
        out.append(f"{report.failures} verdicts failed: their rewards say how")
    if report.absences:
        out.append(f"{report.absences} have no end in the log any more: nothing is left to judge")
    if report.pairs:
        old, new = report.old_sum / report.pairs, report.new_sum / report.pairs
        out.append(f"mean reward {old:.3f} when sealed, {new:.3f} now, over {report.pairs}; {report.changes} differ")
    return out
