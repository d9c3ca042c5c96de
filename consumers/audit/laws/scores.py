"""The law about evaluations: what versions are said to have come to.

Invariants: no code of those who evaluate is used, but for the name that an evaluation has by its content; what it says
beside its scores (tasks, verifier, sampling) that name alone holds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.scores import stored_id
from millrace.infra.log.history.rows import Mark, Row
from millrace.schemas.records import Evaluation, LedgerEntry


class Scores(Law):
    """An evaluation has the name of its content, once; the version that it is about has its digest and entry; its mean,
    its standard error and every pass@k follow from the rewards that it holds."""

    name = "scores"
    sentence = "each evaluation has the name of its content, is of a version as committed, and follows from its rewards"
    unit = "evaluations"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._versions: dict[int, tuple[str, str]] = {}
        """digest and hash of the entry, by version"""
        self._seen: dict[str, Mark] = {}

    def ledger(self, row: Row[LedgerEntry]) -> None:
        self._versions.setdefault(row["version"], (row["digest"], row["hash"].hex()))

    def score(self, row: Row[Evaluation]) -> None:
        self.finding.checked += 1
        id, version = row["id"], row["version"]
        if stored_id(row.value) != id:
            self.fail("an evaluation does not have the name of its content: it was changed", row, evaluation=id)
        first = self._seen.setdefault(id, row.mark)
        if first.place != row.place:
            self.fail("an evaluation lies there twice", first, row, evaluation=id)
        key = "" if version is None else str(version)
        if row["policy"] != self.facts.policy or row.raw.key != key.encode():
            message = f"an evaluation of version {version} of {row['policy']} lies here under key {row.raw.key!r}"
            self.fail(message, row, evaluation=id)
        for problem in (*self._version(row.record), *_figures(row.record)):
            self.fail(f"an evaluation {problem}", row, evaluation=id)

    def _version(self, evaluation: Evaluation) -> Iterator[str]:
        """What is wrong with the versions that it names."""
        version, hash = evaluation["version"], evaluation["ledger_hash"]
        unknown = [one for one in evaluation["versions"] if one not in self._versions]
        if unknown and self.facts.begins_at_zero("ledger"):
            yield f"names version {unknown[0]}, which nobody committed"
        elif version is None:
            if hash is not None:
                yield "names a ledger entry, but no version"
        elif evaluation["versions"] != [version]:
            yield f"is of version {version}, but says that versions {evaluation['versions']} answered"
        elif version in self._versions and (evaluation["digest"], hash) != self._versions[version]:
            yield f"names another digest or ledger entry than that of version {version}"


def _figures(evaluation: Evaluation) -> Iterator[str]:
    """What does not follow from the rewards."""
    tasks = [score["rewards"] for score in evaluation["scores"]]
    verdicts = [[reward for reward in rewards if reward is not None] for rewards in tasks]
    silences = sum(len(rewards) for rewards in tasks) - sum(len(rewards) for rewards in verdicts)
    if evaluation["questions"] != len(tasks) or any(len(rewards) != evaluation["samples"] for rewards in tasks):
        yield f"says {evaluation['questions']} tasks with {evaluation['samples']} answers each; it holds others"
    if evaluation["unjudged"] != silences:
        yield f"says {evaluation['unjudged']} answers without a verdict; it holds {silences}"
    if not 0 <= evaluation["unfinished"] <= sum(len(rewards) for rewards in tasks):
        yield f"says that {evaluation['unfinished']} answers were cut off, which are more than there are"
    means = [math.fsum(rewards) / len(rewards) for rewards in verdicts if rewards]
    true: dict[str, float | None] = {
        "mean": statistics.fmean(means) if means else None,
        "standard_error": statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
    }
    for name, figure in (("mean", evaluation["mean"]), ("standard_error", evaluation["standard_error"])):
        if not _is_close(figure, true[name]):
            yield f"says {name} {figure}; its rewards come to {true[name]}"
    for k, value in evaluation["pass_at"].items():
        if not k.isdigit() or not _is_close(value, _pass_at(verdicts, int(k), evaluation["success"])):
            yield f"says {value} for pass@{k}, which does not follow from its rewards"


def _pass_at(tasks: list[list[float]], k: int, success: float) -> float | None:
    """The mean over tasks with k answers of the chance that one of k is right; None where there is no such task."""
    chances = []
    for rewards in tasks:
        if 1 <= k <= len(rewards):
            wrong = sum(reward < success for reward in rewards)
            chances.append(1 - math.comb(wrong, k) / math.comb(len(rewards), k))
    return statistics.fmean(chances) if chances else None


def _is_close(figure: float | None, true_figure: float | None) -> bool:
    if figure is None or true_figure is None:
        return figure is true_figure
    return math.isclose(figure, true_figure, rel_tol=1e-9, abs_tol=1e-12)
