"""What an answer of an upstream amounts to, and what its call bears for it.

Invariant: what an upstream counted is final for an answer that came to its end; an estimate stands in place of what is
not known, and no record says that an estimate is the cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millrace.dialects.answers import WholeAnswer
from millrace.dialects.reading.reader import ReadAnswer
from millrace.infra.engines.base import ABORT
from millrace.producers.gateway.prices import Prices, cost
from millrace.producers.gateway.spending import Spent, borne, spent

NO_ANSWER = WholeAnswer("", [], (0, 0, 0))


class AnswerFacts(NamedTuple):
    """An answer as it is recorded: the response, and what it says, None where nobody here can read it. `size`: bytes
    that came; `unread`: parts of a stream that could not be read, of `unread_bytes`; `finish`: why it ended, where that
    is not for it to say; `fault`: what is wrong with it, where that is known."""

    response: bytes
    read: ReadAnswer | None
    size: int
    unread: int = 0
    unread_bytes: int = 0
    finish: str | None = None
    streamed: bool = False
    fault: str = ""

    @property
    def answer(self) -> WholeAnswer:
        """What it says; nothing where nobody can read it."""
        return NO_ANSWER if self.read is None else self.read.answer


class Bill(NamedTuple):
    """What all records of a call add, and what the first of them says that it cost: None where nobody knows."""

    spent: Spent
    cost: float | None


def bill_of(facts: AnswerFacts, asked: int, prices: Prices | None, broken: Sequence[int]) -> Bill:
    """What a call bears whose request has so many bytes; `broken`: bytes of each answer that broke off before."""
    answer = facts.answer
    aborted = any((facts.finish or choice.finish or ABORT) == ABORT for choice in answer.choices)
    size = facts.read.size + facts.unread_bytes if facts.read and answer.choices else facts.size
    is_final = not (facts.streamed and aborted)
    usage = borne(answer.usage, asked, size, final=is_final)
    is_counted = is_final and usage == answer.usage
    total = spent(prices, usage)
    for received in broken:
        lost = spent(prices, borne((0, 0, 0), asked, received))
        total = Spent(total.tokens + lost.tokens, total.money + lost.money)
    return Bill(total, cost(prices, usage) if is_counted else None)
