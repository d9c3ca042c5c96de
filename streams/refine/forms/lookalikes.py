"""Letters that look like ASCII, and characters that are not seen.

Invariant: a character folds to one ASCII character, to nothing, or not at all."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from confusable_homoglyphs import confusables

_MARKS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
"""letters and marks without a shape; variation selectors and what Unicode calls a format character come beside them"""


@lru_cache(maxsize=8192)
def fold(char: str) -> str | None:
    """What a character stands for: one ASCII character, "" for one that is not seen, None for itself.

    By NFKC (UAX 15), else by the confusables of Unicode (UTS 39)."""
    if char in _MARKS or unicodedata.category(char) == "Cf" or _is_selector(char):
        return ""
    normal = unicodedata.normalize("NFKC", char)
    if normal.isascii():
        return normal if len(normal) == 1 else None
    if len(normal) != 1:
        return None
    rivals = [entry["c"] for entry in confusables.confusables_data.get(normal, ())]
    letters = [rival for rival in rivals if len(rival) == 1 and rival.isascii()]
    alike = [letter for letter in letters if _case(letter) == _case(normal)]
    return next(iter(alike or letters), None)


def _is_selector(char: str) -> bool:
    return "\ufe00" <= char <= "\ufe0f" or "\U000e0000" <= char <= "\U000e01ef"


def _case(char: str) -> tuple[bool, bool]:
    return char.islower(), char.isupper()
