"""How times, numbers and places are written for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime


def moment(micros: int) -> str:
    """Date and time, UTC; a dash for what no calendar has."""
    try:
        return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "–"


def clock(micros: int) -> str:
    """Time of day, UTC; a dash like `moment`."""
    return moment(micros)[11:] or "–"


def decimal(value: float, digits: int = 3) -> str:
    """A number with so many digits behind the point, a dash for NaN."""
    return "–" if value != value else f"{value:,.{digits}f}"


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers, those that follow each other as one span: `4–6, 9`."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][-1] + 1:
            out[-1] = [out[-1][0], number]
        else:
            out.append([number])
    return ", ".join("–".join(map(str, span)) for span in out)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def short_name(member: str) -> str:
    """A member id without its uuid: what a person can tell apart."""
    name, _, rest = member.partition("@")
    address, _, identity = rest.partition("-")
    if rest and identity:
        return f"{address} ({identity[:4]})"
    return f"{name[:18]}…{name[-6:]}" if len(name) > 28 else name
