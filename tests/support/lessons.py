"""Files to learn from, made from the sort task."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from millrace.apps.demo import sort_digits, tiny
from millrace.trainers.weights import checkpoint


def untrained(directory: Path, seed: int = 0) -> Path:
    """The tiny model before it learned anything."""
    checkpoint.export(directory, tiny.random_state(seed))
    return directory


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Digits, and how they are sorted."""
    return [
        {
            "messages": [
                {"role": "user", "content": digits},
                {"role": "assistant", "content": sort_digits.answer(digits)},
            ]
        }
        for digits in islice(sort_digits.prompts(seed), count)
    ]


def ratings(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The digits sorted, which is good, or the other way round, which is not."""
    return [
        {
            "prompt": row["prompt"],
            "completion": row["rejected" if at % 3 == 0 else "chosen"],
            "label": at % 3 != 0,
        }
        for at, row in enumerate(preferences(count, seed))
    ]


def preferences(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The digits sorted, and the other way round."""
    source = (digits for digits in sort_digits.prompts(seed) if len(set(digits)) > 1)
    return [
        {
            "prompt": [{"role": "user", "content": digits}],
            "chosen": sort_digits.answer(digits),
            "rejected": sort_digits.answer(digits)[::-1],
        }
        for digits in islice(source, count)
    ]
