"""Which claims no record refers to any more, so that content is kept no longer than the topics that carried it.

Invariants: nothing is removed before every topic of the namespace was read to its end; what was stored within the
patience is spared, since its record may still be under way (in an open transaction, or in a gateway that cannot reach
the log); what cannot be read removes nothing.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from infra.bus.base import Bus
from infra.claims import ClaimStore
from infra.topics import full_name
from schemas import codec
from schemas.errors import SchemaError


class Swept(NamedTuple):
    """What a sweep found: claims old enough to look at, how many of those no record refers to, and their bytes."""

    looked_at: int
    removed: int
    bytes: int


def sweep(bus: Bus, namespace: str, claims: ClaimStore, patience_s: float) -> Swept:
    """Remove what was stored more than `patience_s` ago and is in no record of the namespace.

    Raises BusError when a topic cannot be read."""
    moment = time.time() - patience_s
    old = set(claims.older(moment))
    unclaimed = old - claimed(bus, namespace) if old else old
    sizes = [claims.remove(digest, moment) for digest in sorted(unclaimed)]
    return Swept(len(old), sum(size > 0 for size in sizes), sum(sizes))


def claimed(bus: Bus, namespace: str) -> set[str]:
    """Digests of every claim in a record of the namespace, whatever its topic."""
    found = set()
    for topic in bus.topics(full_name(namespace, "")):
        for partition in range(bus.partitions(topic)):
            for record in bus.read(topic, partition):
                claim = _claim(record.value)
                if claim is not None:
                    found.add(claim)
    return found


def _claim(value: bytes | None) -> str | None:
    """The digest in a value that is a claim; topics of the runner hold other bytes too."""
    try:
        if value is None or codec.name_of(value) != "Claim":
            return None
        return str(codec.decode_as("Claim", value)["sha256"])
    except SchemaError:
        return None
