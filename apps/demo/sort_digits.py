"""Sort six digits: the prompt is the digits, the right reply is the same digits in ascending order, and nothing else.

`python -m millrace.apps.demo.sort_digits FILE` writes tasks.

Invariant: a tenth of all prompts, chosen by hash, is held out for evaluation and never handed out for training.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.infra import durable
from millrace.schemas.json_values import JsonObject

DIGITS = 6
HELD_OUT = 10


def answer(digits: str) -> str:
    """What the reply should be."""
    return "".join(sorted(digits))


def verify(digits: str, reply: str) -> float:
    """1.0 for exactly the sorted digits, else 0.0. `reply` is the text before the end token; a reply that was cut off
    fails by its length or by the caller's finish reason."""
    return 1.0 if reply == answer(digits) else 0.0


def questions(seed: int, count: int) -> list[JsonObject]:
    """Tasks of the evaluation split, 256 where `count` is 0."""
    prompt_texts = itertools.islice(prompts(seed, evaluation=True), count or 256)
    return [{"messages": [{"role": "user", "content": digits}]} for digits in prompt_texts]


def judge(task: dict[str, Any], reply: str) -> float:
    """`verify`, of one of the questions."""
    return verify(task["messages"][0]["content"], reply)


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


def main(
    file: Annotated[Path, typer.Argument(help="the JSONL file to write")],
    count: Annotated[int, typer.Option(min=1, help="tasks")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="of the random choice")] = 0,
) -> None:
    """Write tasks of sorting six digits, with their answers."""
    write_tasks(file, count, seed)


if __name__ == "__main__":
    typer.run(main)
