"""What each later reader of the log makes of a log: a function a reader, which ends, or raises what it may.

Invariant: what a function gives depends on the log alone, so that two logs can be compared by it."""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from millrace.consumers.audit import audit
from millrace.consumers.learner.step.next_work import PlacedGroup
from millrace.consumers.learner.step.reading import read
from millrace.consumers.learner.version.log import PolicyLog
from millrace.consumers.reloader import shell
from millrace.consumers.reloader.shell import Reloader
from millrace.consumers.replay.prove.prover import Prover
from millrace.consumers.replay.prove.version_history import RecordedVersions
from millrace.consumers.replay.selection import ModelLimits, Selector
from millrace.consumers.tell.command import account_of, explain_in, lineage_in
from millrace.consumers.tell.pages import account_page, report_page
from millrace.consumers.tell.summary import summary
from millrace.consumers.tell.topics import PolicyTopics
from millrace.consumers.tell.trees import account_tree
from millrace.formats.clearance import anyone
from millrace.formats.exports import export_from
from millrace.formats.exports.select import Selection
from millrace.infra.config import load
from millrace.infra.errors import LookError, MillraceError, SchemaError
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.archiver import Archiver
from millrace.infra.log.archive.bus import ArchivedBus
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.kinds import EVALUATIONS, EVENTS, TRAJECTORIES, topics_of
from millrace.infra.log.history.places import PlaceReader
from millrace.infra.log.history.reader import History
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.terminal import Terminal
from tests.consumers.reloader.conftest import ScriptedEngine
from tests.support.conversations import Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY

STORE = ClaimStore("memory://odd")
LIMITS = ModelLimits(1000, 4000)
LATE = 1e12
"""seconds: later than any record"""


@dataclass(frozen=True)
class Asked:
    """A log, and what is asked about."""

    bus: MemoryBus
    ids: tuple[str, ...]

    @property
    def history(self) -> History:
        return History(self.bus, NS, POLICY, STORE.resolve)


@cache
def history() -> Conversations:
    """The history that is damaged; nobody writes into it."""
    return Conversations(1, versions=4)


@cache
def ids() -> tuple[str, ...]:
    """Of things that happened, and of some that did not."""
    known = History(history().bus, NS, POLICY)
    found: list[str] = []
    for kind in (TRAJECTORIES, EVALUATIONS):
        for row in islice(known.rows(kind), 0, None, 6):
            found += [row["id"], row["group"], row["task_id"]]
    found += [row["id"] for row in islice(known.rows(EVENTS), 0, None, 40) if row.name == "Event"]
    places = (f"{NS}.{POLICY}.trajectories[0]@0", f"{NS}.events/0@3")
    return (*found, *places, "0", "3", "v2", f"{POLICY}@1", "x", "", "²", "\udcff")


def shown(answer: Any) -> str:
    """An answer as a terminal shows it."""
    out = io.StringIO()
    Terminal(file=out, width=100).print(answer, highlight=False)
    return out.getvalue()


def audited(asked: Asked) -> Any:
    return audit(asked.bus, NS, POLICY)


def reported(asked: Asked) -> Any:
    return report_page(summary(asked.bus, NS, POLICY, 1), audit(asked.bus, NS, POLICY))


def explained(asked: Asked) -> Any:
    return [explain_in(PolicyTopics(asked.bus, NS, POLICY, STORE.resolve), one, text=True) for one in asked.ids]


def told(asked: Asked) -> Any:
    """Trajectories: in a terminal, as a page, as JSON."""
    found = []
    for one in asked.ids:
        try:
            account = account_of(PolicyTopics(asked.bus, NS, POLICY, STORE.resolve), one)
        except LookError as error:
            found.append(str(error))
            continue
        found += [shown(account_tree(account, tokens=True)), account_page(account, None), repr(account.as_json())]
    return found


def descended(asked: Asked) -> Any:
    """Lineages of versions, trajectories and tasks."""
    found = []
    for one in asked.ids:
        try:
            answer = lineage_in(PolicyTopics(asked.bus, NS, POLICY, STORE.resolve), one)
        except LookError as error:
            found.append(str(error))
            continue
        found += [shown(answer.tree), repr(answer.json)]
    return found


def exported(asked: Asked) -> Any:
    """Every trajectory that is read is exported, left out or refused."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Selection(evaluation=True)
        said = export_from(asked.history, "jsonl", Path(folder) / "out", wanted, "local", accept_gaps=True)
    assert said.read == said.exported + sum(said.left_out.values()) + sum(said.refused.values())
    return said.exported, said.rows, said.tokens, said.trainable


def selected(asked: Asked) -> Any:
    """What a branch may learn from, by rule and by its places."""
    selector = Selector(asked.history, anyone, "local", LIMITS, accept_gaps=True)
    found = selector.by_rule(lambda _: True)
    places = [one.place for one in found.candidates]
    assert [one.place for one in selector.by_places(places).candidates] == places
    return found.candidates


def proven(asked: Asked) -> Any:
    """What versions were trained on, up to where ranks would train it again."""
    recorded = RecordedVersions(asked.history)
    settings = load(None, {"policy.name": POLICY, "namespace": NS})
    found: list[Any] = [recorded.newest, recorded.holes(), recorded.directories(Path("/nowhere"))]
    with tempfile.TemporaryDirectory() as folder:
        crew: Any = None
        prover = Prover(recorded, {}, PlaceReader(asked.bus, STORE), crew, Path(folder), lambda _: settings)
        for number, version in sorted(recorded.versions.items())[1:]:
            try:
                found.append([one.trajectory for one in prover.material(version, settings, 2).samples])
            except MillraceError as error:
                if isinstance(error, SchemaError):
                    raise
                found.append(f"{number}: {error}")
    return found


def learned(asked: Asked) -> Any:
    """Batch after batch as rank 0 gives them out, and what a rank reads of them."""
    log = PolicyLog(asked.bus, topics_of(NS, POLICY), "reserve", STORE)
    log.catch_up()
    reader, seq, found = PlaceReader(asked.bus, STORE), 0, []
    while (batch := log.order.next(seq)) is not None and len(found) < 50:
        for group in batch.groups:
            places = [(one["topic"], one["partition"], one["offset"]) for one in group["trajectories"]]
            part = PlacedGroup(group["seq"] or 0, group["group"], places)
            share = read(reader, [part], vocabulary=LIMITS.vocabulary, longest=LIMITS.longest)
            found.append((group["seq"], group["group"], [one.trajectory for one in share.samples], share.losses))
        log.frontier.offsets(batch.seq_hi)
        seq = batch.seq_hi
        log.commit(seq)
    committed = log.all_digests(max(0, len(found)))
    return found, committed, log.deltas(committed)


class _Once(asyncio.Event):
    """Set once it was asked twice."""

    asked = 0

    def is_set(self) -> bool:
        self.asked += 1
        return self.asked > 1


def reloaded(asked: Asked) -> Any:
    """The versions that a reloader knows after one turn; their files are nowhere."""
    reloader = Reloader(asked.bus, ScriptedEngine(), namespace=NS, policy=POLICY, worker="engine-odd")
    before, shell.LOOK_S = shell.LOOK_S, 0.0
    try:
        asyncio.run(reloader.run(_Once()))
    finally:
        shell.LOOK_S = before
    events = reloader._machine.events
    return {version: event["digest"] for version, event in sorted(events.items())}


def archived(asked: Asked) -> Any:
    """All that lies there, whatever it is, comes back from the archive as it was."""
    bus = asked.bus
    before = {(t, p): list(bus.read(t, p)) for t in bus.topics(f"{NS}.") for p in range(bus.partitions(t))}
    with tempfile.TemporaryDirectory() as folder:
        archive = Archive(folder)
        archiver = Archiver(bus, archive, NS, STORE, segment_bytes=50_000, close_s=0, raw=True, clock=lambda: LATE)
        for kept in list(archiver.run()):
            bus.delete_before(kept.topic, kept.partition, kept.segment.end)
        both = ArchivedBus(bus, archive)
        for (topic, partition), records in before.items():
            assert list(both.read(topic, partition)) == records, f"{topic}/{partition}"
    return None


READERS: Mapping[str, Callable[[Asked], Any]] = {
    "audit": audited,
    "report": reported,
    "why": explained,
    "trajectory": told,
    "lineage": descended,
    "export": exported,
    "branch": selected,
    "prove": proven,
    "learner": learned,
    "reloader": reloaded,
    "archive": archived,
}
ERRORS = (MillraceError,)
"""how a command may end; a role does not"""
ROLES = frozenset({"learner", "reloader", "archive"})
UNMOVED = ("why", "trajectory", "lineage", "export", "branch", "prove", "learner", "reloader")
"""readers that say the same beside bytes that nobody can read"""
