"""A rebuild: which stages can be folded again, what they give, and the account of it.

Invariants: nothing is folded from the middle: a stage whose first turns, or whose first records, are neither in the
topics nor in the archive is refused with what is left; what is written is what the topics would hold, whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.folds import Makers
from millrace.consumers.audit.turn_outputs import Where
from millrace.consumers.audit.walk import Walk, Watch
from millrace.consumers.replay.rebuild.law import WRITERS, RebuildLaw, TopicTally
from millrace.consumers.replay.rebuild.placing import TurnSpan
from millrace.consumers.replay.rebuild.spool import RebuildSpool, WrittenPartition
from millrace.infra.errors import ReplayError, TopicError
from millrace.infra.log.base import Bus
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.gaps import begins_at, gap_line
from millrace.infra.log.history.kinds import WEIGHTS
from millrace.infra.log.history.reader import left_out
from millrace.infra.log.history.rows import Resolve, as_stored
from millrace.infra.log.topics import TOPICS, full_name, stages_of, turns_of
from millrace.infra.stages.replay import turns
from millrace.schemas.errors import SchemaError

ROWS = {topic.name.rpartition(".")[2]: topic.size for topic in TOPICS}


@dataclass(frozen=True, slots=True)
class RebuildRequest:
    """What to make again. kinds: of topics; is_named: they were asked for by name, so one that is refused is an error;
    slots, shards: of topics that are gone, where nothing else tells; out: where to write them."""

    kinds: Sequence[str] = tuple(WRITERS)
    is_named: bool = False
    slots: int = 1
    shards: int = 1
    out: Path | None = None


@dataclass(slots=True)
class RebuildReport:
    """What a rebuild came to. refusals: why nothing of a topic was made again, by kind; faults: turns that do not fold
    to what they say; outputs: by kind."""

    topics: Mapping[str, str]
    tallies: dict[str, TopicTally]
    refusals: dict[str, str]
    notes: list[str]
    faults: list[str]
    turns: int = 0
    outputs: dict[str, WrittenPartition] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether every record that was asked for was compared, and is as its turn gives it."""
        is_equal = not any(t.different or t.missing or t.additional or t.untried for t in self.tallies.values())
        return is_equal and not self.refusals and not self.faults


def rebuild(
    bus: Bus,
    namespace: str,
    policy: str,
    makers: Makers,
    request: RebuildRequest,
    *,
    release: str = "reserve",
    resolve: Resolve = as_stored,
    claims: ClaimStore | None = None,
    watch: Watch = lambda *_: None,
) -> RebuildReport:
    """Fold what the stages read again, and compare it with what they wrote. Raises AuditError for a policy that is not
    there, ReplayError where a topic that was named cannot be made again, BusError when the log cannot be read."""
    walk = Walk(bus, namespace, policy, resolve, watch)
    facts = Facts(policy, walk.full, walk.starts, release, walk.latest, walk.has_moved)
    roles = [role for role in stages_of(policy) if any(role in WRITERS[kind] for kind in request.kinds)]
    losses, spans = _survey(walk, policy)
    losses = {role: why for role, why in losses.items() if role in roles}
    kinds = [kind for kind in request.kinds if any(role not in losses for role in WRITERS[kind])]
    refusals = {kind: "; ".join(losses[role] for role in WRITERS[kind]) for kind in request.kinds if kind not in kinds}
    if request.is_named and refusals:
        raise ReplayError("; ".join(f"{walk.full[kind]} cannot be made again: {why}" for kind, why in refusals.items()))
    count = _partitions(walk, request)
    with ExitStack() as stack:
        file = stack.enter_context(TemporaryFile(prefix="millrace-rebuild-")) if request.out else None
        spool = RebuildSpool(walk.full, file) if file else None
        role_makers = {role: make for role, make in makers.items() if role in roles and role not in losses}
        law = RebuildLaw(facts, walk, role_makers, kinds, count, spool)
        walk.run(facts, [law])
        finding = law.finding
        notes = [*(f"{role} is not folded again: {why}" for role, why in losses.items()), *finding.notes]
        faults = [f"{one.message}{_of(one.ids)}" for one in finding.violations]
        report = RebuildReport(walk.full, law.tallies, refusals, notes, faults, int(finding.facts["turns"]))
        if spool and request.out:
            report.outputs = spool.write(request.out, kinds, count, spans, claims or ClaimStore(""))
    return report


def _of(ids: Mapping[str, str | int]) -> str:
    return f" (turn {ids['turn']} of {ids['stage']}[{ids['slot']}])" if "turn" in ids else ""


def _survey(walk: Walk, policy: str) -> tuple[dict[str, str], dict[Where, list[TurnSpan]]]:
    """Roles of which nothing can be folded, with why; and what turns took of each partition, in order."""
    losses: dict[str, str] = {}
    spans: defaultdict[Where, list[TurnSpan]] = defaultdict(list)
    kinds = {topic_name: kind for kind, topic_name in walk.full.items()}
    for role, name in stages_of(policy).items():
        kind, reasons = turns_of(role), list[str]()
        if not walk.starts[kind]:
            reasons.append(f"{walk.full[kind]} is neither in the log nor in the archive")
        for slot, start in walk.starts[kind].items():
            if start:
                reasons.append(gap_line(walk.full[kind], slot, 0, start - 1, begins_at(start)))
                continue
            ranges: dict[tuple[str, int], list[TurnSpan]] = {}
            try:
                for _, turn in turns(walk.bus, name, walk.namespace, slot, walk.ends[kind][slot]):
                    for span in turn["ranges"]:
                        where = full_name(walk.namespace, span["topic"]), span["partition"]
                        took = TurnSpan(span["first"], span["last"], span["count"] + span["skipped"])
                        ranges.setdefault(where, []).append(took)
            except SchemaError:
                """Whoever folds it says so."""
            for (topic, partition), some in ranges.items():
                reasons += _gaps(walk.bus, topic, partition, some)
                spans[kinds.get(topic, topic), partition] = some
        if reasons:
            losses[role] = "; ".join(sorted(set(reasons)))
    return losses, spans


def _gaps(bus: Bus, topic: str, partition: int, ranges: Sequence[TurnSpan]) -> list[str]:
    """What is nowhere of that which turns took of a partition."""
    first, last = ranges[0].first, ranges[-1].last
    try:
        start, end = bus.starts(topic).get(partition, 0), bus.ends(topic).get(partition, 0)
    except TopicError:
        return [gap_line(topic, partition, first, last, "nothing of it is left")]
    if end <= last:
        return [gap_line(topic, partition, max(first, end), last, f"what is left ends at {end - 1}")]
    if first < start:
        return [gap_line(topic, partition, first, start - 1, begins_at(start))]
    return []


def _partitions(walk: Walk, names: RebuildRequest) -> dict[str, int]:
    """How many partitions each kind has; of one that is gone, as many as others of its size, or as the policy says."""
    first = next(iter(walk.history.rows(WEIGHTS, unreadable=left_out)), None)
    shards = (first["shards"] if first else None) or names.shards
    sizes = {"slots": len(walk.starts[turns_of("seal")]) or names.slots, "shards": shards, "one": 1}
    return {kind: len(walk.starts.get(kind, {})) or sizes[ROWS[kind]] for kind in WRITERS}
