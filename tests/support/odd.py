"""Records that fit their schema and make no sense: a strategy a kind, made from the schemas themselves.

Invariant: whatever is drawn encodes. Every kind of value takes its extremes: numbers at the ends of their range and of
64 bits, NaN and infinities, names of a megabyte, deep and endless JSON, empty strings and lists."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st

from millrace.schemas import bounds
from millrace.schemas.registry import NAMESPACE, current

LONG = 2**63 - 1
NUMBERS = [0, 1, -1, 2, 7, bounds.GROUP_SIZE + 1, bounds.INT, -bounds.INT, 2**31, 2**53 + 1, LONG, -LONG - 1]
FLOATS = [0.0, 1.0, -1.0, 1e30, -1e308, float("nan"), float("inf"), float("-inf"), 5e-324]
DEEP = "[" * 600 + "]" * 600
TEXTS = [
    "",
    "x",
    "{}",
    '{"a": 1}',
    "p",
    "local",
    "~slot",
    "a/b/c",
    "../../x",
    "\x00\x1f\x7f",
    "\u202e\U0001f600",
    "x" * (bounds.NAME_BYTES + 1),
    DEEP,
    '{"a":' * 200 + "1" + "}" * 200,
    "[" + "1," * 5000 + "1]",
    "9" * 5000,
    '"\\ud800"',
    '{"a": 1e999, "b": 123456789012345678901234567890}',
    "ghp_" + "a1B2" * 9,
]
HUGE = "y" * 1_200_000


@cache
def records(name: str, *, huge: bool = False, held: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    """Any record of this name; with `huge`, names may be larger than what a topic takes."""
    fields = current(name).definition["fields"]
    return st.fixed_dictionaries({field["name"]: _of(field["type"], huge, held=held) for field in fields})


def texts(*, huge: bool = False) -> st.SearchStrategy[str]:
    """Odd text."""
    return st.sampled_from([*TEXTS, *([HUGE] if huge else [])])


def _of(kind: Any, huge: bool, *, held: bool = False) -> st.SearchStrategy[Any]:
    if isinstance(kind, list):
        # The writer looks into what a union may hold, and there alone it knows how large an int is.
        return st.one_of([_of(one, huge, held=True) for one in kind])
    if isinstance(kind, str):
        kind = {"type": "named", "name": kind} if kind.startswith(NAMESPACE) else {"type": kind}
    match kind["type"]:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "int" if held:
            return st.sampled_from([number for number in NUMBERS if abs(number) <= bounds.INT])
        case "int" | "long":
            return st.sampled_from(NUMBERS)
        case "double" | "float":
            return st.sampled_from(FLOATS)
        case "string":
            return texts(huge=huge)
        case "bytes":
            return st.sampled_from([b"", b"\x00", b"{", b"\xc3\x01short", DEEP.encode(), b"\x01\x02\x03\x04" * 3])
        case "array":
            return st.lists(_of(kind["items"], huge, held=held), max_size=3)
        case "map":
            return st.dictionaries(texts(), _of(kind["values"], huge, held=held), max_size=3)
        case "enum":
            return st.sampled_from(kind["symbols"])
        case "record":
            return records(kind["name"].removeprefix(f"{NAMESPACE}."), huge=huge, held=held)
        case _:
            return _of(current(kind["name"].removeprefix(f"{NAMESPACE}.")).definition, huge, held=held)
