"""Flags that name trajectories of the history: by SQL, or by a file of places."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.infra.errors import ConfigError
from millrace.infra.log.base import Place

Select = Annotated[
    str,
    typer.Option(
        metavar="SQL",
        help="the trajectories that this query gives: topic, part and off, or trajectory; a file ending with .sql",
    ),
]
Places = Annotated[
    Path | None,
    typer.Option(
        help="the trajectories at these places: a CSV or JSON-lines file with the columns topic, part and off",
        exists=True,
        dir_okay=False,
    ),
]
AcceptGaps = Annotated[
    bool,
    typer.Option("--what-is-left", help="take what is left of a history of which topics and archive have lost a part"),
]


def query(text: str) -> str:
    """The text of a query, or of the file that it names. Raises ConfigError for one that cannot be read."""
    if not text.endswith(".sql"):
        return text
    try:
        return Path(text).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text} cannot be read: {error}") from None


def read_places(path: Path) -> Iterator[Place]:
    """Places from rows of topic, part and off. Raises ConfigError naming the line that is none."""
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    rows: Iterator[Any]
    if lines and lines[0].lstrip().startswith("{"):
        rows = (_json(line, number, path) for number, line in enumerate(lines, 1))
    else:
        rows = csv.DictReader(lines)
    for number, row in enumerate(rows, 1):
        try:
            yield Place(str(row["topic"]), int(row["part"]), int(row["off"]))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path}, row {number} is no place: it needs the columns topic, part and off") from None


def _json(line: str, number: int, path: Path) -> object:
    try:
        return json.loads(line)
    except ValueError:
        raise ConfigError(f"{path}, row {number} is no JSON") from None
