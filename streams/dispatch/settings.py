"""What can be asked for in `decisions`, and from where it holds.

Invariants: B changes at a batch boundary behind every outstanding deadline; eta and the group size for new grants only,
so a ticket keeps the size that it was granted with; the release policy
when nothing is outstanding, since the guarantee of one does not survive groups released under another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from millrace.schemas import bounds
from millrace.streams.dispatch.release_policies import POLICIES
from millrace.streams.dispatch.state import Book, SettingsInForce


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is in force from a seq or a ticket on."""

    name: str
    value: object
    from_seq: int | None
    from_ticket: int | None


OTHER_SETTINGS = frozenset({"sealing"})
"""settings of a policy that other stages read"""


def _integer(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


_VALID: dict[str, Callable[[object], bool]] = {
    "batch": _integer(1, bounds.BATCH),
    "eta": _integer(0, bounds.ETA),
    "group_size": _integer(1, bounds.GROUP_SIZE),
    "release": lambda value: isinstance(value, str) and value in POLICIES,
    "unsolicited_share": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    ),
    "lease_ms": _integer(1, bounds.WAIT_MS),
    "max_running": _integer(0, bounds.INT),
    "dynamic_sampling": lambda value: isinstance(value, bool),
}


def parse(name: str, text: str) -> tuple[object, str | None]:
    """(value, why it is refused or None)."""
    if name not in _VALID:
        return None, f"no setting is called {name[:40]!r}; there are {', '.join(_VALID)}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None, f"the value of {name} is not JSON"
    return value, None if _VALID[name](value) else f"{name} cannot have this value"


def ask(name: str, value: Any, book: Book, rules: SettingsInForce) -> tuple[SettingsInForce, Change | None]:
    """The rules after a valid setting was asked for, and the change if it is in force already."""
    match name:
        case "batch":
            schedule = rules.schedule(book)
            last = max([schedule.batch_of(book.seq), book.version + rules.eta, *book.deadlines()])
            first, sizes = schedule.with_size(last, value)
            return replace(rules, sizes=sizes), Change(name, value, first, None)
        case "eta":
            return replace(rules, eta=value), Change(name, value, None, book.granted)
        case "group_size":
            return replace(rules, group_size=value), Change(name, value, None, book.granted)
        case "release":
            return settle(book, replace(rules, next_release=None if value == rules.release else value))
        case "unsolicited_share":
            return replace(rules, unsolicited_share=float(value)), Change(name, value, book.seq, None)
        case "lease_ms":
            return replace(rules, lease=value * 1000), Change(name, value, None, book.granted)
        case "dynamic_sampling":
            return replace(rules, dynamic_sampling=value), Change(name, value, book.seq, None)
        case _:
            return replace(rules, max_running=value), Change(name, value, None, book.granted)


def settle(book: Book, rules: SettingsInForce) -> tuple[SettingsInForce, Change | None]:
    """Put a waiting release policy in force once nothing is outstanding."""
    if rules.next_release is None or book.outstanding:
        return rules, None
    change = Change("release", rules.next_release, book.seq, book.granted)
    return replace(rules, release=rules.next_release, next_release=None), change


def first(rules: SettingsInForce) -> list[Change]:
    """Every setting as a policy begins, so that the topics alone tell what was in force. The group size is no part of
    it, since version 0 tells it: what a policy wrote as it began folds again to the same records."""
    return [
        Change("batch", rules.sizes[0][1], 0, None),
        Change("eta", rules.eta, None, 0),
        Change("release", rules.release, 0, 0),
        Change("unsolicited_share", rules.unsolicited_share, 0, None),
        Change("lease_ms", rules.lease // 1000, None, 0),
        Change("max_running", rules.max_running, None, 0),
        Change("dynamic_sampling", rules.dynamic_sampling, 0, None),
    ]
