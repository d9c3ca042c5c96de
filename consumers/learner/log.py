"""What rank 0 knows from the log: the order of learning, the frontier of what is settled, the committed digests.

Invariants: read_committed, from the start once a process, then followed; `completions` is read to a later point than
`resolutions`, so that a resolution is never folded before its completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from consumers.learner.frontier import Frontier
from consumers.learner.order import Order
from infra.bus.base import Bus, Record
from infra.errors import LedgerError
from schemas import codec
from schemas.records import Completion, Resolution, WeightVersion


class Log:
    """Follows the policy's one-partition topics. `catch_up` reads everything that is new."""

    def __init__(self, bus: Bus, topics: Mapping[str, str], release: str) -> None:
        self._bus = bus
        self._topics = topics
        self._next = dict.fromkeys(("weights", "completions", "resolutions"), 0)
        self.digests: dict[int, str] = {}
        """digest by committed version"""
        self.deltas: set[int] = set()
        """committed versions that engines read as changes to their parent"""
        self._first: WeightVersion | None = None
        first = self._weights()
        self.order = Order(batch=first["batch"] or 1, eta=first["eta"] or 0, release=release)
        self.frontier = Frontier()

    def catch_up(self) -> None:
        """Fold what is new in `completions` and `resolutions`."""
        end = self._bus.ends(self._topics["resolutions"])[0]
        if end <= self._next["resolutions"]:
            return
        for record in self._read("completions", None):
            self.frontier.complete(cast(Completion, codec.decode_as("Completion", record.value or b"")))
        for record in self._read("resolutions", end):
            resolution = cast(Resolution, codec.decode_as("Resolution", record.value or b""))
            self.order.fold(resolution)
            self.frontier.resolve(resolution)

    def committed(self, seq_hi: int) -> None:
        """A version up to `seq_hi` is committed."""
        self.order.commit(seq_hi)
        self.frontier.commit(seq_hi)

    def all_digests(self) -> Mapping[int, str]:
        """Digest by version, up to the newest committed one."""
        self._weights()
        return self.digests

    def _weights(self) -> WeightVersion:
        for record in self._read("weights", None):
            event = cast(WeightVersion, codec.decode_as("WeightVersion", record.value or b""))
            self._first = self._first or event
            self.digests[event["version"]] = event["digest"]
            if event["mode"] == "delta":
                self.deltas.add(event["version"])
        if self._first is None:
            raise LedgerError(
                f"{self._topics['weights']} is empty: `millrace policy create --model DIR` writes version 0"
            )
        return self._first

    def _read(self, name: str, end: int | None) -> Iterator[Record]:
        topic = self._topics[name]
        stop = self._bus.ends(topic)[0] if end is None else end
        if stop > self._next[name]:
            for record in self._bus.read(topic, 0, self._next[name], stop):
                yield record
                self._next[name] = record.offset + 1
            self._next[name] = stop
