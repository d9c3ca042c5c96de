"""What corruptions are made with. Where someone who can write would link a hash chain anew, they do so too: then only
the law itself can tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from millrace.infra.log.base import Place, Record
from millrace.schemas.arrays import pack, unpack
from tests.support.history import History

Corruption = Callable[[History, random.Random], Place | None]
"""breaks a world and says which record must be among those named"""
Change = Callable[[dict[str, Any]], None]


def pick(h: History, rng: random.Random, kind: str, only: Callable[[dict[str, Any]], bool] = lambda _: True) -> Any:
    """A random record of a topic that fits: (record, decoded)."""
    return rng.choice([(record, value) for record, value in h.rows(kind) if only(value)])


def edit(
    h: History, rng: random.Random, kind: str, change: Callable[[dict[str, Any]], None], /, **wanted: Any
) -> Place:
    record, value = pick(h, rng, kind, lambda row: all(row[name] == is_ for name, is_ in wanted.items()))
    change(value)
    h.rewrite(record, value)
    return record.place


def ledger(h: History, rng: random.Random, change: Change) -> Place:
    """Change a trained version's entry and link the ledger anew, so that only the law itself can tell."""
    record, value = pick(h, rng, "ledger", lambda row: row["version"] > 0)
    change(value)
    h.rewrite(record, value)
    h.forge_ledger()
    return record.place


def trained(h: History) -> list[tuple[Record, dict[str, Any]]]:
    """Trajectories inside committed versions that train on something."""
    places = {tuple(p.values()) for _, e in h.rows("ledger") for g in e["groups"] for p in g["trajectories"]}
    return [(record, value) for record, value in h.rows("trajectories") if record.place in places and value["tokens"]]


def retoken(
    h: History, rng: random.Random, field: str, change: Callable[[Any, int], None], *, fix: bool = False
) -> Place:
    """Change one element of an array of a trained sample, at a token that trains."""
    record, value = rng.choice(trained(h))
    lineage = value["lineages"][0]
    array = unpack(lineage[field]).copy()
    change(array, int(rng.choice(np.flatnonzero(unpack(lineage["mask"])))))
    lineage[field] = pack(array)
    if fix:
        versions = unpack(lineage["versions"])[unpack(lineage["mask"]).astype(bool)]
        value |= {"v_head": int(versions.min()), "v_tail": int(versions.max())}
    h.rewrite(record, value)
    return record.place


def put(at: int, array: Any, value: float) -> None:
    array[at] = value
