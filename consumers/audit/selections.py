"""The selection of a branch, put together again from what its versions were trained on. Pure.

A branch goes through the items of its selection in an order that follows from its seed, epoch after epoch, and the
ledger lists them as they were trained. So the groups of the first epoch, put back into order, are the selection, and
its digest can be taken anew. Invariant: no code of those who make branches is used but the order itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from millrace.schemas.records import Place, TrainedGroup
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.offline.order import ItemOrder

Item = tuple[tuple[str, int, int], ...]
"""places of a group, in their order"""


def item(group: TrainedGroup) -> Item:
    """The places of a group, as the ledger lists them."""
    return tuple(_plain(place) for place in group["trajectories"])


def said_order(config: str) -> tuple[int, int] | None:
    """Batch and seed of a branch, by the configuration in its ledger entry; None where that says none."""
    try:
        branch = json.loads(config)["branch"]
        return int(branch["batch"]), int(branch["seed"])
    except (ValueError, TypeError, KeyError):
        return None


def digest(trained: Sequence[Item], batch: int, seed: int) -> str | None:
    """sha256 hex over the places of a selection in its own order. trained: its items in the order of the first epoch;
    None for an order that cannot be."""
    try:
        order = ItemOrder(len(trained), batch, seed)
        places = [index for step in range(order.steps) for index in order.items(step)]
    except (BadConfiguration, ValueError):
        return None
    found = dict(zip(places, trained, strict=True))
    out = hashlib.sha256()
    for index in range(len(trained)):
        for topic, partition, offset in found[index]:
            out.update(f"{topic}/{partition}@{offset}\n".encode())
    return out.hexdigest()


def _plain(place: Place) -> tuple[str, int, int]:
    return place["topic"], place["partition"], place["offset"]
