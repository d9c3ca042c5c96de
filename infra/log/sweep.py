"""Which claims no record refers to any more, so that content is kept no longer than the topics that carried it.

Invariants: nothing is removed before every topic of the namespace was read to its end; what was stored within the
patience is spared, since its record may still be under way (in an open transaction, or in a gateway that cannot reach
the log); what cannot be read removes nothing. Several may sweep the same claims.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

from millrace.infra.errors import BusError, ClaimError
from millrace.infra.log.base import Bus
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import full_name
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError

log = logging.getLogger(__name__)

Where = tuple[str, int]
"""topic and partition"""


class Swept(NamedTuple):
    """What a sweep found: claims old enough to look at, how many of those no record refers to, and their bytes."""

    looked_at: int
    removed: int
    bytes: int


class Sweeper:
    """Sweeps one namespace again and again: each time it reads only what was written since."""

    def __init__(self, bus: Bus, namespace: str, claims: ClaimStore, patience_s: float) -> None:
        self._bus = bus
        self._prefix = full_name(namespace, "")
        self._claims = claims
        self._patience_s = patience_s
        self._read: dict[Where, int] = {}
        """the offset behind the last that was read"""
        self._places: dict[str, dict[Where, int]] = {}
        """by digest, the last record of each partition that refers to it"""

    def sweep(self) -> Swept:
        """Remove what was stored more than the patience ago and is in no record of the namespace.

        Raises BusError when a topic cannot be read."""
        moment = time.time() - self._patience_s
        candidates = set(self._claims.older(moment))
        orphans = candidates - self._claims_in_use() if candidates else candidates
        sizes = [self._claims.remove(digest, moment) for digest in sorted(orphans)]
        return Swept(len(candidates), sum(size > 0 for size in sizes), sum(sizes))

    def _claims_in_use(self) -> set[str]:
        """Digests of every claim in a record of the namespace, whatever its topic."""
        starts: dict[Where, int] = {}
        for topic in self._bus.topics(self._prefix):
            starts |= {(topic, partition): start for partition, start in self._bus.starts(topic).items()}
            for partition, end in self._bus.ends(topic).items():
                where = (topic, partition)
                for record in self._bus.read(topic, partition, self._read.get(where, 0), end):
                    digest = _claim(record.value)
                    if digest is not None:
                        self._places.setdefault(digest, {})[where] = record.offset
                self._read[where] = end
        for digest, places in list(self._places.items()):
            present = {where: at for where, at in places.items() if where in starts and at >= starts[where]}
            if present:
                self._places[digest] = present
            else:
                del self._places[digest]
        return set(self._places)


class Sweeping:
    """A thread that sweeps every `interval_s` while the context lasts. `connect` opens a bus of its own."""

    def __init__(
        self, connect: Callable[[], Bus], namespace: str, claims: ClaimStore, *, patience_s: float, interval_s: float
    ) -> None:
        self._connect = connect
        self._namespace = namespace
        self._claims = claims
        self._patience_s = patience_s
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=5)  # a sweep in the middle of a long read ends with the process

    def _run(self) -> None:
        # Several processes that start together need not sweep together.
        while not self._stop.wait(self._interval_s * random.uniform(0.5, 1)):
            try:
                with self._connect() as bus:
                    sweeper = Sweeper(bus, self._namespace, self._claims, self._patience_s)
                    while not self._stop.is_set():
                        result = sweeper.sweep()
                        log.info(
                            "swept %d of %d older bodies, %d bytes", result.removed, result.looked_at, result.bytes
                        )
                        self._stop.wait(self._interval_s)
            except (BusError, ClaimError, OSError) as error:
                log.warning("large records that nothing refers to were not swept, tried again later: %s", error)


def sweep(bus: Bus, namespace: str, claims: ClaimStore, patience_s: float) -> Swept:
    """One sweep, as `Sweeper.sweep`."""
    return Sweeper(bus, namespace, claims, patience_s).sweep()


def _claim(value: bytes | None) -> str | None:
    """The digest in a value that is a claim; topics of the runner hold other bytes too."""
    try:
        if value is None or codec.name_of(value) != "Claim":
            return None
        return str(codec.decode_as("Claim", value)["sha256"])
    except SchemaError:
        return None
