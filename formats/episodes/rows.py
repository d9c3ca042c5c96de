"""One row of a file, why one cannot be imported, and the small readings that every layout needs. Pure.

Invariants: a row is a JSON object without nulls inside; what cannot be read as what it should be is a `BadRow` with a
code for machines and words without content; a time is micros since the epoch, and unknown rather than guessed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import orjson

from millrace.schemas import bounds
from millrace.schemas.ids import Micros

Content = dict[str, Any]
TIMES = ("timestamp", "event_time", "created_at", "created", "time")
"""keys under which a row or a message may say when it was, the first of them that does"""
_SECONDS, _MILLIS, _MICROS = 1e11, 1e14, 1e17
"""numbers below them are taken for seconds, milliseconds, microseconds since the epoch; above the last nanoseconds"""


class BadRow(Exception):
    """A row that cannot be imported. `code`: why, for machines."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


@dataclass(frozen=True, slots=True)
class ImportRow:
    """A row. number: its line in a file of lines, else its place, from 1; content: the object without nulls."""

    number: int
    content: Content


def without_nulls(value: object) -> Any:
    """A JSON value without entries that are null: columns have them wherever a row lacks a key."""
    if isinstance(value, Mapping):
        return {str(name): without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(one) for one in value]
    return value


def json_text(value: object) -> str:
    """A value as JSON; dates, of columns, as text."""
    try:
        return orjson.dumps(value, default=_plain_text).decode()
    except TypeError as error:  # numbers of more than 64 bits
        raise BadRow("not_json", f"a value has no place in JSON: {error}") from None


def _plain_text(value: object) -> str:
    if isinstance(value, date | Decimal):
        return str(value)
    raise TypeError(type(value).__name__)


def time_of(content: Mapping[str, object]) -> Micros | None:
    """When a row or a message says that it was. Raises BadRow for a time that is none."""
    for name in TIMES:
        if content.get(name) is not None:
            return micros(content[name], name)
    return None


def micros(value: object, name: str) -> Micros:
    """A time as micros since the epoch: a number in any usual unit, or ISO 8601. Raises BadRow."""
    time: float | None = None
    if isinstance(value, str):
        time = _parse_time(value)
    elif isinstance(value, datetime):
        time = _since(value)
    elif isinstance(value, date):
        time = _since(datetime(value.year, value.month, value.day))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        time = _scale(value)
    if time is None or not math.isfinite(time) or not 0 <= time <= bounds.TIME:
        raise BadRow("bad_time", f"{name} is no time between 1970 and 2255: write seconds since 1970, or ISO 8601")
    return int(time)


def _scale(value: float) -> float:
    if value < _SECONDS:
        return round(value * 1e6)
    if value < _MILLIS:
        return round(value * 1e3)
    return value if value < _MICROS else value // 1000


def _parse_time(text: str) -> float | None:
    try:
        return _scale(float(text))
    except ValueError:
        pass
    except OverflowError:
        return None
    try:
        return _since(datetime.fromisoformat(text))
    except ValueError:
        return None


def _since(when: datetime) -> float:
    aware = when if when.tzinfo else when.replace(tzinfo=UTC)
    age = aware - datetime(1970, 1, 1, tzinfo=UTC)
    return (age.days * 86_400 + age.seconds) * 1_000_000 + age.microseconds


def text_of(content: Mapping[str, object], *names: str) -> str:
    """The first of these keys that holds a text or a number, as text; empty where none does."""
    for name in names:
        value = content.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    return ""


def number_of(value: object, name: str) -> float:
    """A finite number within the bound of rewards. Raises BadRow."""
    if not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > bounds.REWARD:
        raise BadRow("bad_reward", f"{name} is no number within {bounds.REWARD:,.0f}")
    return float(value)


def whole_number(value: object) -> int:
    """A count that a file claims; 0 for anything that is none."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value) if len(value) < 11 else 0
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0
    return int(value) if 0 <= value <= bounds.INT else 0
