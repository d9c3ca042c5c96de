"""When a group may be granted a ticket, and when one that comes without may be given a ticket and a seq at once.

G granted, R resolved negatively, S ready, O = G - R - S outstanding, v the newest known version, n_k the unresolved
tickets with deadline <= k, end(k) the end of batch k, U what is kept free for unsolicited groups.

    (I1)  G - R < end(v + eta) - U, that is lag + outstanding < (eta + 1) B when B is constant and U = 0
    (J)   for every k with n_k >= 1:  S + n_k <= end(k)

A grant has deadline v + eta. It keeps (J) for every k, also after eta was lowered and deadlines no longer rise with
tickets; with one eta (J) at v + eta is (I1). Stale views are safe: R, v and end(v + eta) only grow, so an old view
grants less. Proof: by (J) at its own deadline d a released group has S + 1 <= end(d): it lies in batch d or before."""

from __future__ import annotations

import math
from collections.abc import Sequence

from millrace.streams.dispatch.schedule import BatchSchedule
from millrace.streams.dispatch.state import Book, SettingsInForce

EVEN = "dynamic sampling: its rewards are all equal"
"""why a group that teaches nothing gets no seq"""


def is_even(rewards: Sequence[float]) -> bool:
    """Whether a group of several rewarded samples teaches nothing, since none did better than another. NaN is none."""
    numbers = [reward for reward in rewards if not math.isnan(reward)]
    return len(numbers) > 1 and min(numbers) == max(numbers)


def kept_free(book: Book, rules: SettingsInForce, schedule: BatchSchedule) -> int:
    """U: the share of unsolicited groups less what they have, and nothing of the batch that trains next: production
    traffic that never comes must not stop training."""
    end = schedule.end(book.version + rules.eta)
    share = int(rules.unsolicited_share * (end - book.seq_hi)) - len(book.unsolicited)
    return max(0, min(share, end - schedule.end(book.version)))


def may_grant(book: Book, rules: SettingsInForce, schedule: BatchSchedule) -> bool:
    """Whether one more group may start."""
    if rules.next_release is not None or (rules.max_running and book.running >= rules.max_running):
        return False
    deadline = book.version + rules.eta
    if book.granted - book.negative >= schedule.end(deadline) - kept_free(book, rules, schedule):
        return False
    if rules.release != "reserve":
        return True
    return all(book.seq + book.urgent(k) + 1 <= schedule.end(k) for k in {deadline, *book.deadlines()} if k >= deadline)


def may_admit(book: Book, rules: SettingsInForce, schedule: BatchSchedule, v_head: int, v_tail: int) -> str | None:
    """Why an unsolicited group may not be given the next ticket and the next seq at once; None when it may.

    It never waits: either every outstanding guarantee, and its own, holds with the seq taken, or it is declined."""
    if rules.next_release is not None:
        return "the release policy is changing"
    if len(book.unsolicited) + 1 > rules.unsolicited_share * (schedule.end(book.version + rules.eta) - book.seq_hi):
        return "over the share of unsolicited groups"
    if book.granted - book.negative >= schedule.end(book.version + rules.eta):
        return "no room before the next version"
    oldest = {"reserve": v_head, "reject": v_head, "mask-head": v_tail}.get(rules.release)
    if oldest is not None and schedule.batch_of(book.seq) - oldest > rules.eta:
        return "too old"
    if rules.release == "reserve" and any(book.seq + 1 + book.urgent(k) > schedule.end(k) for k in book.deadlines()):
        return "it would push a granted group past its deadline"
    return None
