"""Tokens of a lineage as runs: neighbours of one version and one weight in the loss. Pure.

Invariant: runs follow each other without a hole and hold every token once, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from millrace.infra.log.history.rows import Row
from millrace.schemas.arrays import unpack
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import LedgerEntry, Lineage

Weight = Literal["context", "left out", "may train", "trained", "stale"]
"""What a token counts in the loss: `context` was read and not sampled; `left out` was sampled and may not train;
`may train` has a mask of 1 and no version trained on it (yet); `trained` counted; `stale` was masked in its version
because it was older than eta allowed."""
Spell = Callable[[int], str]
"""the text of a token"""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens [start, end) of a lineage. version: that sampled them, None for context; logprob: their mean
    log-probability, None where none is kept."""

    start: int
    end: int
    version: int | None
    weight: Weight
    logprob: float | None
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Traced:
    """One lineage: its runs, and how many of its tokens have which weight. unreadable: why there are no runs, where
    its arrays are none."""

    id: str
    runs: tuple[TokenRun, ...]
    calls: tuple[str, ...]
    unreadable: str | None = None

    @property
    def length(self) -> int:
        """Its tokens."""
        return self.runs[-1].end if self.runs else 0

    def count(self) -> dict[str, int]:
        """Tokens by weight."""
        out: dict[str, int] = {}
        for run in self.runs:
            out[run.weight] = out.get(run.weight, 0) + run.end - run.start
        return out


def traced(lineage: Lineage, entry: Row[LedgerEntry] | None, *, lost: bool = False) -> Traced:
    """The runs of a lineage; `entry`: of the version that trained on it, `lost` where it could not read it."""
    arrays = (lineage["tokens"], lineage["mask"], lineage["logprobs"], lineage["versions"])
    try:
        parts = [unpack(array) for array in arrays]
    except SchemaError as error:
        return Traced(lineage["id"], (), tuple(lineage["calls"]), unreadable=str(error))
    many = min(len(part) for part in parts)
    tokens, mask, logprobs, versions = (part[:many].tolist() for part in parts)
    oldest = entry["version"] - 1 - entry["eta"] if entry is not None and entry["masked_tokens"] else None
    weights = [
        _weight(bool(one), version, trained=entry is not None and not lost, oldest=oldest)
        for one, version in zip(mask, versions, strict=True)
    ]
    runs = []
    for (version, weight), members in groupby(range(many), key=lambda at: (versions[at], weights[at])):
        at = list(members)
        own = [logprobs[one] for one in at] if mask[at[0]] else []
        runs.append(
            TokenRun(
                at[0],
                at[-1] + 1,
                version if version >= 0 else None,
                weight,
                float(np.mean(own)) if own else None,
                tuple(tokens[one] for one in at),
                tuple(own),
            )
        )
    return Traced(lineage["id"], tuple(runs), tuple(lineage["calls"]))


def _weight(mask: bool, version: int, *, trained: bool, oldest: int | None) -> Weight:
    if not mask:
        return "context" if version < 0 else "left out"
    if not trained:
        return "may train"
    return "stale" if oldest is not None and version < oldest else "trained"


def spelled(run: TokenRun, spell: Spell | None) -> Sequence[str]:
    """Each token's text, or its number where no tokenizer is known."""
    return [spell(token) if spell is not None else str(token) for token in run.tokens]
