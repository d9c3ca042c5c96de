"""What a client reads and writes again has the same key, whatever numbers are in it and however deep it nests.

`MILLRACE_FUZZ` says how many inputs (`make fuzz N=1000000`); a failure names its number."""

from __future__ import annotations

import json
import os
from random import Random

from millrace.dialects import match_keys
from tests.support import odd_json

VALUES = int(os.environ.get("MILLRACE_FUZZ", "0")) // 100 or 300
GIVEN = {"name": "f", "parameters": {"a": 1, "b": [2.5, "x"]}}
"""a tool as clients describe it, which is a part of what names a conversation"""


def _read(digits: str) -> int | float:
    """An integer as a reader gets it who has 64 bits for it, else a float."""
    number = int(digits)
    try:
        return number if -(2**63) <= number < 2**64 else float(number)
    except OverflowError:
        return number


def same_keys(count: int = VALUES) -> None:
    """Compare the keys of `count` values, read in both ways. Raises AssertionError."""
    for seed in range(count):
        r = Random(seed)
        text = odd_json.text(odd_json.changed(r, GIVEN))
        try:
            given, echoed = json.loads(text), json.loads(text, parse_int=_read)
        except (ValueError, RecursionError):
            continue  # not JSON, or more digits and levels than anyone reads
        assert match_keys.canonical(given) == match_keys.canonical(echoed), f"value {seed}: {text[:200]}"


def test_what_is_read_and_written_again_has_the_same_key() -> None:
    same_keys()
