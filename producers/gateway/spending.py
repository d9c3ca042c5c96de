"""What each key of the gateway spends: tokens in a minute, money in a number of hours.

Invariants: what calls spend is a fold over the capture log, where each says beside its event who bears it and how much
(`SPENT_HEADER`, which stays there), so a start knows what was spent before it; what is not captured (embeddings)
counts beside them until the gateway ends; it counts by whole windows of the clock, and time never goes back; a
call is refused before anybody is asked for it, and never while it runs; two keys never share, whoever's they are; what
a reply that is cut off bears is no less than the estimate of what was passed on of it, and never falls as more of it
comes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from millrace.dialects.errors import ApiError
from millrace.producers.gateway.prices import Prices, Usage, cost

SPENT_HEADER = "_spent"
"""header of a call's entry: tokens, money and the key that bears them"""
BYTES = 4
"""of text for a token, where nobody counted them"""
MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may take, None: as much as it likes. `budget` is money in each `budget_hours`."""

    max_in_flight: int | None = None
    max_rate: float | None = None
    tokens_per_minute: int | None = None
    budget: float | None = None
    budget_hours: float = 24.0


class Expense(NamedTuple):
    """What a record of a call adds. `money`: 0 where nobody knows a price."""

    tokens: int
    money: float

    def note(self, key: str) -> dict[str, str]:
        """The header that says so, of a record that `key` bears; none for nobody's."""
        return {SPENT_HEADER: f"{self.tokens} {self.money!r} {key}"} if key else {}


def parse_expense(note: str) -> tuple[str, Expense]:
    """A key, and what it bears. Raises ValueError for what is no such note."""
    tokens, money, key = note.split(" ", 2)
    return key, Expense(int(tokens), float(money))


def expense_of(prices: Prices | None, usage: Usage) -> Expense:
    """Of a call with this usage."""
    return Expense(usage[0] + usage[1], cost(prices, usage) or 0.0)


def bill_usage(usage: Usage, request_bytes: int, reply_bytes: int, *, final: bool = True) -> Usage:
    """The usage that a call bears: what the upstream counted (0 where it did not), and in place of what it did not
    count an estimate from `request_bytes` and `reply_bytes`. A count that is not `final`, of a reply that was cut off,
    is no less than the estimate of what was said."""
    prompt, completion, cached_tokens = usage
    if not (completion and final):
        completion = max(completion, estimate(reply_bytes))
    return prompt or estimate(request_bytes), completion, cached_tokens


def estimate(size: int) -> int:
    """Tokens of so many bytes."""
    return -(-size // BYTES)


class Window:
    """The sum of one window of the clock, the newest in which anything was added; earlier ones are forgotten."""

    def __init__(self, length_us: float) -> None:
        self.length_us = max(1, int(length_us))
        self._number = 0
        self._sum = 0.0

    def add(self, at: int, amount: float) -> None:
        """Something more, at a time in micros. What belongs to an earlier window counts no more."""
        number = at // self.length_us
        if number > self._number:
            self._number, self._sum = number, 0.0
        if number == self._number:
            self._sum += amount

    def restore(self, number: int, amount: float) -> None:
        """Begin with this sum in the window of this number."""
        self._number, self._sum = number, amount

    def used(self, now: int) -> float:
        """What was added in the window of now."""
        return self._sum if now // self.length_us <= self._number else 0.0

    @property
    def standing(self) -> tuple[int, float]:
        """The number of the window, and its sum."""
        return self._number, self._sum

    def left_s(self, now: int) -> int:
        """Seconds until the next window, at least 1."""
        end = (max(now // self.length_us, self._number) + 1) * self.length_us
        return max(1, math.ceil((end - now) / 1e6))


Standing = dict[str, tuple[int, float, int, float]]
"""of each key: the number of its newest minute and the tokens in it, the number of its newest budget and the money"""


class Spending:
    """What each of the keys in `limits`, by name, has spent, here and, as far as they told, at other processes."""

    def __init__(self, limits: Mapping[str, KeyLimits]) -> None:
        self.limits = dict(limits)
        self._tokens = {key: Window(MINUTE_US) for key in limits}
        self._money = {key: Window(key_limits.budget_hours * HOUR_US) for key, key_limits in limits.items()}
        self._others: dict[int, Standing] = {}

    def adopt(self, limits: Mapping[str, KeyLimits]) -> None:
        """Bound these keys so from now on, beside the others. What one has spent of a budget stays, unless its hours
        are others now."""
        for key, key_limits in limits.items():
            former = self.limits.get(key)
            self._tokens.setdefault(key, Window(MINUTE_US))
            if former is None or former.budget_hours != key_limits.budget_hours:
                self._money[key] = Window(key_limits.budget_hours * HOUR_US)
            self.limits[key] = key_limits

    def fold(self, headers: Mapping[str, str], at: int) -> None:
        """One entry of the capture log, captured at this time. What no gateway wrote, or of a key that is gone, adds
        nothing."""
        if SPENT_HEADER not in headers:
            return
        try:
            key, expense = parse_expense(headers[SPENT_HEADER])
        except ValueError:
            return
        self.add(key, expense, at)

    def add(self, key: str, expense: Expense, at: int) -> None:
        """What this key spent at a time in micros; nothing for one without limits."""
        if key in self.limits:
            self._tokens[key].add(at, expense.tokens)
            self._money[key].add(at, expense.money)

    def used(self, key: str, now: int) -> Expense:
        """What a key has spent of this minute, and of this budget."""
        if key not in self.limits:
            return Expense(0, 0.0)
        key_limits = self.limits[key]
        tokens, money = self._tokens[key].used(now), self._money[key].used(now)
        for standing in self._others.values():
            if key in standing:
                minute, their_tokens, hours, their_money = standing[key]
                tokens += their_tokens * (minute == now // MINUTE_US)
                money += their_money * (hours == now // int(key_limits.budget_hours * HOUR_US))
        return Expense(int(tokens), money)

    def standing(self) -> Standing:
        """What was spent here, for the other processes of the gateway."""
        return {key: (*self._tokens[key].standing, *self._money[key].standing) for key in self.limits}

    @property
    def windows(self) -> dict[str, float]:
        """Hours of the budget of each key."""
        return {key: key_limits.budget_hours for key, key_limits in self.limits.items()}

    def restore(self, standing: Standing) -> None:
        """What was spent before a start, as `standing` told it. Keys without limits are left out."""
        for key, (minute, tokens, hours, money) in standing.items():
            if key in self.limits:
                self._tokens[key].restore(minute, tokens)
                self._money[key].restore(hours, money)

    def note_standing(self, index: int, standing: Standing) -> None:
        """What was spent at another process, in place of what it told before."""
        self._others[index] = standing

    def check(self, key: str, now: int) -> None:
        """A call of this key is about to begin. Raises ApiError 429 where nothing is left for it."""
        key_limits, used = self.limits.get(key), self.used(key, now)
        if key_limits is None:
            return
        if key_limits.tokens_per_minute is not None and used.tokens >= key_limits.tokens_per_minute:
            message = f"This key has used its {key_limits.tokens_per_minute} tokens of this minute"
            raise _over(message, "tokens_per_minute", self._tokens[key].left_s(now))
        if key_limits.budget is not None and used.money >= key_limits.budget:
            message = f"This key has spent its budget of {key_limits.budget:g} for {key_limits.budget_hours:g} hours"
            raise _over(message, "budget_spent", self._money[key].left_s(now))


def _over(message: str, code: str, wait_s: int) -> ApiError:
    text = f"{message}: try again in {wait_s} s"
    return ApiError(429, text, type="rate_limit_error", code=code, retry_after_s=wait_s)
