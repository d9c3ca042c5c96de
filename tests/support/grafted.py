"""A branch in a log in memory: weight events and ledger of another policy, which begins at a version of the first one
and is trained on its trajectories, as `replay branch` writes them, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.consumers.learner.group.identity import Identity
from millrace.consumers.learner.version.records import Machine
from millrace.consumers.replay.branch.items import BranchItem
from millrace.consumers.replay.branch.records import BranchChoice, ledger_entry, weight_event
from millrace.infra.log.base import Outgoing, Place
from millrace.infra.log.history import newest
from millrace.infra.log.history.ledger import chain_entry
from millrace.infra.log.history.newest import Head
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.topics import TopicSizes, full_name
from millrace.schemas import codec
from millrace.schemas.records import LedgerEntry, WeightVersion
from millrace.trainers.weights.checkpoint import Checkpoint

Group = tuple[str, Sequence[Place]]
CHOICE = BranchChoice("best", "d" * 64, 3, None, None)


def graft(
    bus: MemoryBus, namespace: str, source: str, at: int, name: str, batches: Sequence[Sequence[Group]]
) -> list[WeightVersion]:
    """Branch `name` from version `at` of a policy, a version for each batch of groups; gives its events."""
    own = {kind: full_name(namespace, f"{name}.{kind}") for kind in ("weights", "ledger")}
    theirs = {kind: full_name(namespace, f"{source}.{kind}") for kind in own}
    begins = newest.older(bus, theirs["weights"], theirs["ledger"], at)
    assert begins is not None
    specs = TopicSizes(namespace, name, 1, 1).specs()
    bus.ensure_topics([spec for spec in specs if spec.name not in bus.specs])
    time = begins.weights["time"]
    first: WeightVersion = {**begins.weights, "policy": name, "version": 0, "parent": at, "parent_policy": source}
    first |= {"seq_lo": 0, "seq_hi": 0, "batch": 2, "eta": 1, "shards": 1, "group_size": 2}
    entry: LedgerEntry = {**begins.entry, "policy": name, "version": 0, "seq_lo": 0, "seq_hi": 0, "groups": []}
    heads = [Head(first, chain_entry({**entry, "ranks": [], "metrics": {}}, b""))]
    for number, groups in enumerate(batches, 1):
        head = heads[-1]
        digest = f"{number:02x}" * 32
        files = dict(head.weights["files"])
        event = weight_event(head, Checkpoint(Path("/gone"), digest, files), CHOICE, 1, time + number)
        items = [BranchItem(group, tuple(places), (1.0,) * len(places), 1) for group, places in groups]
        heads.append(Head(event, ledger_entry(head, event, items, {}, "branch", NOBODY, Machine("cpu", 1), 1)))
    publisher = bus.publisher()
    for head in heads:
        found: Any = (("weights", "WeightVersion", head.weights), ("ledger", "LedgerEntry", head.entry))
        for kind, record, value in found:
            publisher.publish(Outgoing(own[kind], name.encode(), codec.encode(record, value), {}, 0)).result()
    return [head.weights for head in heads]


NOBODY = Identity("c", "k", {}, "x", "{}", {})
