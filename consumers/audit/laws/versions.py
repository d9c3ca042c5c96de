"""Laws about the versions of a policy: weight events, what trained them, and the settings that shaped them.

A branch goes through the items of its selection in an order that follows from its seed, epoch after epoch, and the
ledger lists them as they were trained. So the groups of the first epoch, put back into order, are the selection, and
its digest can be taken anew. Invariant: no code of those who make branches is used but the order itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.infra.log.history.ledger import stored_hash
from millrace.infra.log.history.rows import Mark, Row
from millrace.schemas.records import LedgerEntry, Place, TrainedGroup, WeightVersion
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.offline.order import ItemOrder

Item = tuple[tuple[str, int, int], ...]
"""places of a group, in their order"""


def item(group: TrainedGroup) -> Item:
    """The places of a group, as the ledger lists them."""
    return tuple(_as_tuple(place) for place in group["trajectories"])


def said_order(config: str) -> tuple[int, int] | None:
    """Batch and seed of a branch, by the configuration in its ledger entry; None where that says none."""
    try:
        branch = json.loads(config)["branch"]
        return int(branch["batch"]), int(branch["seed"])
    except (ValueError, TypeError, KeyError):
        return None


def digest(items: Sequence[Item], batch: int, seed: int) -> str | None:
    """sha256 hex over the places of a selection in its own order. trained: its items in the order of the first epoch;
    None for an order that cannot be."""
    try:
        order = ItemOrder(len(items), batch, seed)
        places = [index for step in range(order.steps) for index in order.items(step)]
    except (BadConfiguration, ValueError):
        return None
    by_place = dict(zip(places, items, strict=True))
    out = hashlib.sha256()
    for index in range(len(items)):
        for topic, partition, offset in by_place[index]:
            out.update(f"{topic}/{partition}@{offset}\n".encode())
    return out.hexdigest()


def _as_tuple(place: Place) -> tuple[str, int, int]:
    return place["topic"], place["partition"], place["offset"]


NO_SEQ = -1
"""the seq of what was never in the order of learning"""


class _CommonFacts(NamedTuple):
    """What a weight event and its ledger entry both say."""

    digest: str
    seq_lo: int
    seq_hi: int
    policy: str


def _common_facts(row: Row[LedgerEntry] | Row[WeightVersion]) -> _CommonFacts:
    return _CommonFacts(row["digest"], row["seq_lo"], row["seq_hi"], row["policy"])


class Versions(Law):
    """Each weight event has one ledger entry, and the other way round: one transaction wrote both."""

    name = "versions"
    sentence = "weight versions are dense from 0, each from its parent, and agree with the ledger"
    unit = "versions"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._last: tuple[int, Mark] | None = None
        self._weights: dict[int, Row[WeightVersion]] = {}
        self._entries: set[int] = set()

    def weights(self, row: Row[WeightVersion]) -> None:
        version = row["version"]
        self.finding.checked += 1
        next_version = self._last[0] + 1 if self._last else 0
        if version != next_version and (self._last or self.facts.begins_at_zero("weights")):
            marks = [self._last[1], row.mark] if self._last else [row.mark]
            self.fail(f"weight event of version {version} where {next_version} belongs", *marks, version=version)
        parent = version - 1 if version else None
        if not version and row["parent_policy"] is not None:
            # A branch: its first weights are those of a version of another policy.
            if row["parent"] is None or row["parent"] < 0:
                self.fail(f"version 0 names no version of {row['parent_policy']} as its parent", row, version=0)
        elif row["parent"] != parent:
            self.fail(f"version {version} names parent {row['parent']} instead of {parent}", row, version=version)
        if version in self._weights:
            self.fail(f"version {version} has two weight events", self._weights[version], row, version=version)
        self._weights.setdefault(version, row)
        self._last = (version, row.mark)

    def ledger(self, row: Row[LedgerEntry]) -> None:
        version = row["version"]
        event = self._weights.get(version)
        if version in self._entries:
            self.fail(f"version {version} has two ledger entries", row, version=version)
        elif event is None:
            if self.facts.begins_at_zero("weights"):
                self.fail(f"ledger entry of version {version}, which has no weight event", row, version=version)
        else:
            for field, entry_value, event_value in zip(
                _CommonFacts._fields, _common_facts(row), _common_facts(event), strict=True
            ):
                if entry_value != event_value:
                    message = f"version {version}: {field} is {entry_value} in the ledger, {event_value} in its event"
                    self.fail(message, event, row, version=version)
            parent = self._weights.get(version - 1)
            if row["unchanged"] and parent is not None and parent["digest"] != row["digest"]:
                message = f"version {version} says its bytes are its parent's ({row['unchanged']}), but they differ"
                self.fail(message, parent, row, version=version)
        self._entries.add(version)

    def finish(self) -> None:
        begins = min(self._entries, default=0) if not self.facts.begins_at_zero("ledger") else 0
        for version, row in self._weights.items():
            if version >= begins and version not in self._entries:
                self.fail(f"weight event of version {version} has no ledger entry", row, version=version)


class Tiles(Law):
    """Ledger v+1 begins where v ended, takes whole batches of the B in force, and lists each seq of its range. A
    version of a branch takes none of the order: its range is empty, and its groups name what a selection gave of the
    policy that it comes from, under seq -1; where all of it was trained, its digest is theirs."""

    name = "tiles"
    sentence = "the ledger's seq ranges tile from 0, each a batch of the B in force, and list every seq"
    unit = "entries"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._ranges: list[tuple[int, int, int, Mark]] = []
        self._selected: set[tuple[str, int, int]] = set()
        self._items: list[Item] = []
        """of a branch, as they were first trained"""
        self._order: tuple[int, int] | None = None
        self._last_selected: Row[LedgerEntry] | None = None

    def ledger(self, row: Row[LedgerEntry]) -> None:
        version, low, high = row["version"], row["seq_lo"], row["seq_hi"]
        self.finding.checked += 1
        if not self._ranges:
            if version == 0 and (low, high) != (0, 0):
                self.fail(f"version 0 trained on seqs {low} to {high}: it comes from nothing", row, version=0)
            elif version and self.facts.begins_at_zero("ledger"):
                self.fail(f"the ledger begins with version {version}", row, version=version)
        else:
            last, _, end, mark = self._ranges[-1]
            if version != last + 1:
                self.fail(f"ledger entry of version {version} follows {last}", mark, row, version=version)
            if low != end:
                message = f"version {version} begins at seq {low}, but the entry before it ended at {end}"
                self.fail(message, mark, row, version=version)
        seqs = [group["seq"] for group in row["groups"]]
        if version in self.facts.selected:
            for problem in self._branch(row, self.facts.selected[version]):
                self.fail(f"version {version}, which was trained on a selection, {problem}", row, version=version)
        elif len(seqs) != max(0, high - low) or seqs != list(range(low, low + len(seqs))):
            message = f"version {version} covers seqs {low} to {high} but lists {_spans(seqs)}"
            self.fail(message, row, version=version)
        self._ranges.append((version, low, high, row.mark))

    def _branch(self, row: Row[LedgerEntry], places: int) -> Iterator[str]:
        """What is wrong with an entry of a branch. places: how many its selection has."""
        if row["seq_lo"] != row["seq_hi"]:
            yield f"takes seqs {row['seq_lo']} to {row['seq_hi']} of the order"
        if not row["groups"] or any(group["seq"] != NO_SEQ or not group["trajectories"] for group in row["groups"]):
            yield "does not name the places that it was trained on, all of them under no seq"
        named_places = [place for group in row["groups"] for place in group["trajectories"]]
        source = f".{self.facts.parent_policy}.trajectories"
        if any(not place["topic"].endswith(source) for place in named_places):
            yield f"names a place that is no trajectory of {self.facts.parent_policy}"
        for group in row["groups"]:
            if not self._selected.issuperset(group_places := item(group)):
                self._items.append(group_places)
                self._selected.update(group_places)
        self._order = self._order or said_order(row["config"])
        self._last_selected = row
        if len(self._selected) > places:
            yield f"and those before it name {len(self._selected)} places of a selection of {places}"

    def _check_digest(self, row: Row[LedgerEntry]) -> None:
        """The digest of the selection, where all of it was trained by `row`, the last version that names it."""
        version, count = row["version"], len(self._selected)
        if count > self.facts.selected[version]:
            return  # that is said already
        if count < self.facts.selected[version]:
            self.note(
                f"{count} of {self.facts.selected[version]} places of the selection were trained, so its digest cannot "
                "be taken anew"
            )
        elif self._order is None or not self.facts.begins_at_zero("ledger"):
            self.note("nothing says in which order the selection was trained, so its digest cannot be taken anew")
        elif digest(self._items, *self._order) != self.facts.selection_digest:
            message = f"versions up to {version} were trained on other places than their selection's digest says"
            self.fail(message, row, version=version)

    def finish(self) -> None:
        """Sizes are checked last: settings are read after the ledger."""
        if self._last_selected is not None:
            self._check_digest(self._last_selected)
        for version, low, high, mark in self._ranges:
            batch = self.facts.batch.at(low)
            change = self.facts.batch.until(low)
            if version == 0 or batch is None or version in self.facts.selected:
                continue
            if high - low != batch:
                message = f"version {version} trained on {high - low} groups where B is {batch}"
                self.fail(message, mark, version=version)
            elif change is not None and change < high:
                self.fail(f"B changes at seq {change}, inside version {version}", mark, version=version)


class LedgerChain(Law):
    """Every entry has the hash of its stored bytes and names its parent's."""

    name = "ledger-chain"
    sentence = "the ledger's hash chain is unbroken"
    unit = "links"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._last: tuple[bytes, Mark] | None = None

    def ledger(self, row: Row[LedgerEntry]) -> None:
        version = row["version"]
        self.finding.checked += 1
        if stored_hash(row.value) != row["hash"]:
            self.fail(
                f"entry of version {version} does not have the hash of its bytes: it was changed", row, version=version
            )
        if self._last is not None and row["prev_hash"] != self._last[0]:
            self.fail(
                f"entry of version {version} does not name the hash of the entry before it",
                self._last[1],
                row,
                version=version,
            )
        elif self._last is None and version == 0 and row["prev_hash"]:
            self.fail("entry of version 0 names a parent's hash", row, version=0)
        self._last = (row["hash"], row.mark)


def _spans(seqs: list[int]) -> str:
    """Numbers as spans: 0-3, 7."""
    parts: list[list[int]] = []
    for seq in seqs:
        if parts and seq == parts[-1][1] + 1:
            parts[-1][1] = seq
        else:
            parts.append([seq, seq])
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in parts) or "none"
