"""Sort six digits: the prompt is the digits, the right reply is the same digits in ascending order, and nothing else.

Invariant: a tenth of all prompts, chosen by hash, is held out for evaluation and never handed out for training.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from millrace.infra import durable

DIGITS = 6
HELD_OUT = 10


def answer(digits: str) -> str:
    """What the reply should be."""
    return "".join(sorted(digits))


def verify(digits: str, reply: str) -> float:
    """1.0 for exactly the sorted digits, else 0.0. `reply` is the text before the end token; a reply that was cut off
    fails by its length or by the caller's finish reason."""
    return 1.0 if reply == answer(digits) else 0.0


def held_out(digits: str) -> bool:
    """Whether a prompt belongs to evaluation."""
    return hashlib.sha256(digits.encode()).digest()[0] * HELD_OUT < 256


def prompts(seed: int, *, evaluation: bool = False) -> Iterator[str]:
    """Endless random prompts of one split, the same for the same seed."""
    draw = random.Random(seed)
    while True:
        digits = f"{draw.randrange(10**DIGITS):0{DIGITS}d}"
        if held_out(digits) == evaluation:
            yield digits


def write_tasks(path: Path, n: int, seed: int, *, evaluation: bool = False) -> None:
    """Writes n prompts as JSON lines: id, messages, answer. When it returns they are on the disk."""
    source = prompts(seed, evaluation=evaluation)
    lines = []
    for index, digits in enumerate(itertools.islice(source, n)):
        row = {
            "id": f"sort-{seed}-{index}",
            "messages": [{"role": "user", "content": digits}],
            "answer": answer(digits),
        }
        lines.append(json.dumps(row) + "\n")
    durable.write(path, "".join(lines), mode=0o644)
