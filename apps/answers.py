"""Questions about a deployment and their answers: what `doctor` and `check` show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Word = Literal["ok", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Answer:
    """One question and its answer."""

    question: str
    word: Word
    said: str
