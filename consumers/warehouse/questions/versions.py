"""Whether the versions that a question is about exist.

Invariant: a version that nobody made is an error that says which there are, never an empty answer."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.consumers.warehouse.client import Asking
from millrace.consumers.warehouse.questions.catalog import POLICY, Question
from millrace.infra.errors import QuestionError

VERSIONS = ("version", "a", "b")
"""parameters that name one version of the policy"""
NEWEST = "SELECT policy, max(version) AS newest FROM millrace_log.weights GROUP BY policy ORDER BY policy"


def check(asking: Asking, question: Question, values: Mapping[str, str]) -> None:
    """Raises QuestionError for a version that its policy does not have, or a policy without any."""
    versions = [int(values[parameter.name]) for parameter in question.parameters if parameter.name in VERSIONS]
    if not versions:
        return
    columns = asking.table(NEWEST).to_pydict()
    newest = dict(zip(columns.get("policy", ()), columns.get("newest", ()), strict=True))
    policy = values[POLICY]
    if policy not in newest:
        there = f"there are {', '.join(newest)}: --policy names one" if newest else "nor has any other policy yet"
        raise QuestionError(f"policy {policy} has no version in the warehouse; {there}")
    for version in versions:
        if version > newest[policy]:
            raise QuestionError(f"policy {policy} has no version {version}, the newest is {newest[policy]}")
