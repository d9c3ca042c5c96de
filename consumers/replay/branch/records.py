"""Weight event and ledger entry of a version of a branch. Pure.

A branch takes nothing of the order of learning: its ranges of seqs are empty and its groups have seq -1, so the policy
may go on online from seq 0. Its groups name places in the topic of the policy that it comes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.consumers.learner.group.identity import Identity
from millrace.consumers.learner.version import records
from millrace.consumers.learner.version.order import Batch
from millrace.consumers.learner.version.records import Machine, WrittenVersion
from millrace.consumers.replay.branch.items import BranchItem
from millrace.infra.log.history.ledger import chain_entry
from millrace.infra.log.history.newest import Head
from millrace.schemas.records import LedgerEntry, RankShare, TrainedGroup, WeightVersion
from millrace.trainers.weights.checkpoint import Checkpoint

NO_SEQ = -1
TOTALS = (
    "tokens_trainable",
    "tokens_computed",
    "tokens_pulling",
    "samples",
    "samples_without_reward",
    "steps",
    "steps_skipped",
)
"""metrics that count; the others are means over the batches of a version"""
ELSEWHERE = ("staleness_", "tokens_per_second")
"""metrics that say nothing of a branch: its samples are versions of another policy old"""


@dataclass(frozen=True, slots=True)
class BranchChoice:
    """What a branch is trained on: text, digest and number of places of the selection, and whose rewards; where it has
    replies without exact tokens, how many, and the form of the renderer that wrote them."""

    text: str
    digest: str
    places: int
    source: str | None
    rubric: str | None
    text_replies: int | None = None
    text_form: str | None = None


def version_metrics(batches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a version from those of its batches."""
    names = sorted({name for batch in batches for name in batch if not name.startswith(ELSEWHERE)})
    out = {}
    for name in names:
        values = [batch[name] for batch in batches if name in batch]
        total = math.fsum(values)
        out[name] = total if name in TOTALS or name.startswith("timings_") else total / len(values)
    return out


def weight_event(head: Head, checkpoint: Checkpoint, choice: BranchChoice, size: int, time: int) -> WeightVersion:
    """The event that makes `checkpoint` the version after `head`. size: bytes of its weight files; time: micros."""
    version = WrittenVersion(str(checkpoint.path), checkpoint.digest, checkpoint.files, size)
    return {
        **records.weight_event(head, Batch(head.seq_hi, (), 0), version, time),
        "selection": choice.text,
        "selection_digest": choice.digest,
        "selection_places": choice.places,
        "reward_source": choice.source,
        "reward_rubric": choice.rubric,
        "text_replies": choice.text_replies,
        "text_form": choice.text_form,
    }


def ledger_entry(
    head: Head,
    event: WeightVersion,
    items: Sequence[BranchItem],
    metrics: Mapping[str, float],
    member: str,
    identity: Identity,
    machine: Machine,
    eta: int,
) -> LedgerEntry:
    """The entry of `event`, which follows `head`. items: in the order in which they were trained; member: who trained
    them, unlike any other process."""
    tokens = int(metrics.get("tokens_computed", 0))
    share: RankShare = {
        "rank": 0,
        "member": member,
        "samples": int(metrics.get("samples", 0)),
        "tokens": tokens,
        "groups": len(items),
        "cell": 0,
    }
    return chain_entry(
        {
            "policy": event["policy"],
            "version": event["version"],
            "seq_lo": event["seq_lo"],
            "seq_hi": event["seq_hi"],
            "groups": [_group(item) for item in items],
            "ranks": [share],
            "layout": "torch:d1",
            "generation": 0,
            "leader": member,
            "unchanged": "no optimizer step was taken" if event["digest"] == head.weights["digest"] else None,
            "masked_tokens": 0,
            "digest": event["digest"],
            "libraries": dict(identity.libraries),
            "cpu": identity.cpu,
            "config_hash": identity.config,
            "code_hash": identity.code,
            "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
            "eta": eta,
            "prev_hash": b"",
            "hash": b"",
            "time": event["time"],
            "config": identity.text,
            "models": dict(identity.models),
            "device": machine.device,
            "threads": machine.threads,
            "kernels": dict(machine.kernels),
        },
        head.entry["hash"],
    )


def _group(item: BranchItem) -> TrainedGroup:
    places = [place._asdict() for place in item.places]
    return {
        "seq": NO_SEQ,
        "ticket": None,
        "group": item.group,
        "trajectories": places,  # type: ignore[typeddict-item]
        "lost": None,
        "cell": 0,
    }
