"""Rank 0's half of a step: what the ranks trained becomes a version, or does not. One version is one transaction: the
weight event, its ledger entry and the consumed offsets.

A version is written and committed in a thread of its own, beside the next step, which trains from the weights that the
ranks hold already. One version at a time is on its way: the next one waits for its outcome, and so does every end of
the generation. Where the outcome is no version, the generation ends, and with it the step that was trained on.

Invariants: the transactional id is opened before the ledger is read, and again after every outcome that is unknown; the
weights are durable under their final name before the transaction begins; both fences hold (the member token was taken
when the ranks agreed, with a generation of at least 0); nothing is acted on before the commit has returned; what failed
is never repeated from memory: the group forms again and trains the same batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from millrace.consumers.learner.group.agreement import Roster
from millrace.consumers.learner.step.parts import Parts
from millrace.consumers.learner.version.collect import collect, serving_versions
from millrace.consumers.learner.version.log import PolicyLog
from millrace.consumers.learner.version.order import Batch
from millrace.consumers.learner.version.records import Machine, WrittenVersion, ledger_entry, rank_shares, weight_event
from millrace.infra import faults
from millrace.infra.errors import BusError, FencedError, LearnerError, RefusedError, UnreachableError
from millrace.infra.log.base import MemberToken, Outgoing, Transactor
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history import newest
from millrace.infra.log.history.newest import Head
from millrace.infra.versions import directory
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from millrace.schemas.records import LedgerEntry, WeightVersion
from millrace.trainers import flops
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.learning import Report
from millrace.trainers.phase_clock import Clock
from millrace.trainers.weights import checkpoint, delta_files
from millrace.trainers.weights.checkpoint import Checkpoint
from millrace.trainers.weights.state import State


def commit_version(
    transactor: Transactor,
    weights: WeightVersion,
    entry: LedgerEntry,
    offsets: Mapping[tuple[str, int], int],
    token: MemberToken,
    *,
    weights_topic: str,
    ledger_topic: str,
) -> None:
    """Make `weights` a version.

    Raises RefusedError (aborted: the group moved on), FencedError (another leader owns the policy), UnreachableError
    (outcome unknown: drop the transactor, open it again, read the ledger)."""
    if token.generation < 0:
        raise RefusedError("this member never joined a generation: its commit would be unfenced; join first")
    faults.point("learner.before_begin")
    transactor.begin()
    faults.point("learner.after_begin")
    transactor.send(Outgoing(weights_topic, weights["policy"].encode(), codec.encode("WeightVersion", weights)))
    faults.point("learner.after_send_weights")
    transactor.send(Outgoing(ledger_topic, str(entry["version"]).encode(), codec.encode("LedgerEntry", entry)))
    faults.point("learner.after_send_ledger")
    transactor.flush()
    faults.point("learner.before_commit")
    transactor.commit(offsets, token)
    faults.point("learner.after_commit")


def checkpoint_fault(name: str) -> None:
    """The points of `trainers.weights.checkpoint` and `delta_files`, whose callers say what happens at them, under
    names that the list of points finds."""
    match name:
        case "checkpoint.between_files":
            faults.point("checkpoint.between_files")
        case "checkpoint.after_write":
            faults.point("checkpoint.after_write")
        case "checkpoint.after_fsync":
            faults.point("checkpoint.after_fsync")
        case "checkpoint.before_rename":
            faults.point("checkpoint.before_rename")
        case "checkpoint.after_rename":
            faults.point("checkpoint.after_rename")
        case "checkpoint.after_parent_fsync":
            faults.point("checkpoint.after_parent_fsync")
        case "delta.before_rename":
            faults.point("delta.before_rename")
        case "delta.after_rename":
            faults.point("delta.after_rename")
        case _:
            raise ValueError(f"{name} is a kill point that has no name here: add it")


SPARE = 4
"""directories beyond those kept before it is worth asking who serves what"""


@dataclass(frozen=True, slots=True)
class Step:
    """What the ranks made of a batch: what waits for the full state, the trainer's report, why groups were lost (by
    seq), to which cell each rank belongs, and which cell a group was given to (by seq)."""

    batch: Batch
    finish: Callable[[], State]
    report: Report
    losses: Mapping[int, str]
    cells: Sequence[int]
    cell_by_seq: Mapping[int, int]


def machine(kernels: Mapping[str, str]) -> Machine:
    """What this process computes on, and with: the backends take a GPU where there is one."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return Machine(device, torch.get_num_threads(), kernels)


class Leader:
    """Rank 0 of one generation. `head`: the newest committed version."""

    def __init__(self, parts: Parts, roster: Roster, token: MemberToken) -> None:
        self._parts = parts
        self._roster = roster
        self._token = token
        self._transactor: Transactor | None = None
        self._clock = Clock()
        """of the thread that writes and commits"""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._publication: Future[Head | str] | None = None
        self._collection: Future[list[str]] | None = None
        self.failure: str | None = None
        """why the last commit did not happen"""
        self.head = self._fence()
        self.version, self.seq_hi = self.head.version, self.head.seq_hi
        """of the weights that the ranks hold: the newest version's, committed or on its way"""
        self.log = parts.log = parts.log or PolicyLog(
            parts.bus, parts.topics, parts.settings.policy.release, ClaimStore(parts.settings.claims)
        )
        self.log.commit(self.head.seq_hi)

    def close(self) -> None:
        """Wait for what is on its way, and drop the transactor. It is never kept: the next leader fences before it
        reads."""
        try:
            self.settle()
            if self._collection is not None:
                self._collection.result()
        finally:
            self._writer.shutdown()
            self._drop()

    def _drop(self) -> None:
        transactor, self._transactor = self._transactor, None
        if transactor is not None:
            transactor.close()

    def next_batch(self) -> Batch | None:
        """The batch that the newest version trains, once all of its groups are ready."""
        self.log.catch_up()
        return self.log.order.next(self.seq_hi)

    def publish(self, step: Step) -> None:
        """Begin to make the step a version, once the one before it is one. `settle` says what came of it."""
        p = self._parts
        with p.backend.clock.phase("publish"):
            self.settle()
        if self.failure is not None:
            return
        metrics = step.report.metrics
        metrics.update(_timings(metrics, p.backend.clock.drain()))
        if self._roster.spares:
            metrics["spares"] = float(len(self._roster.spares))
        self.version, self.seq_hi = self.head.version + 1, step.batch.seq_hi
        self._publication = self._writer.submit(
            self._write, step, self.log.frontier.offsets(self.seq_hi), p.backend.layout, machine(p.trainer.kernels)
        )

    def settle(self, *, wait: bool = True) -> None:
        """Take what came of the version on its way, if that is known, or once it is: it is committed, or `failure` says
        why not, and the generation must end. Raises what ended the thread."""
        publication = self._publication
        if publication is None or not (wait or publication.done()):
            return
        self._publication = None
        p, outcome = self._parts, publication.result()
        if isinstance(outcome, str):
            self.failure = outcome
            p.observer.warn(outcome)
            return
        self.head = outcome
        self.log.commit(self.head.seq_hi)
        p.observer.on_phase("committed")
        p.observer.on_commit(self.head.entry)
        self._collect()

    def _write(self, step: Step, offsets: Mapping[int, int], layout: str, here: Machine) -> Head | str:
        """In the thread: the version on the disk, then in the log. The new head, or why there is none."""
        p, metrics = self._parts, step.report.metrics
        with self._clock.phase("copy"):
            state = step.finish()
        metrics.update(flops.utilisation(state, metrics, self._roster.world))
        with self._clock.phase("checkpoint"):
            snapshot = checkpoint.write(p.root, self.head.version + 1, state, fault=checkpoint_fault)
            version = self._version_of(snapshot, step.report)
        metrics.update({f"timings_beside_{name}": seconds for name, seconds in self._clock.drain().items()})
        now = now_micros()
        event = weight_event(self.head, step.batch, version, now)
        entry = ledger_entry(
            self.head,
            step.batch,
            version,
            step.report,
            step.losses,
            self._roster,
            rank_shares(self._roster, step.cells, step.report.shares),
            layout,
            p.identity,
            here,
            now,
            step.cell_by_seq,
        )
        with self._clock.phase("commit"):
            failure = self._commit(event, entry, offsets)
        return Head(event, entry) if failure is None else failure

    def _version_of(self, snapshot: Checkpoint, report: Report) -> WrittenVersion:
        """The directory, and the other ways that lead to it: what changed since its parent, where this version is not
        an anchor, and a broadcast, where engines take them."""
        p, size = self._parts, delta_files.full_size(snapshot.path)
        delta, every = None, p.settings.learner.anchor_every
        if (self.head.version + 1) % every:
            try:
                parent = directory(self.head.weights, p.root)
                delta = delta_files.write(parent, snapshot.path, fault=checkpoint_fault)
            except CorruptCheckpoint as error:
                p.observer.warn(f"version {self.head.version + 1} is announced whole: {error}")
        if every > 1:
            report.metrics.update(full_bytes=float(size), sent_bytes=float(delta.size if delta else size))
        url = None
        if p.sender is not None and checkpoint.WEIGHTS in snapshot.files:  # an adapter alone is read from its directory
            p.sender.hold(self.head.version + 1, snapshot.digest, snapshot.path / checkpoint.WEIGHTS)
            url = p.sender.url  # before the event: who reads that asks at once
        return WrittenVersion(str(snapshot.path), snapshot.digest, snapshot.files, size, delta, url)

    def _fence(self) -> Head:
        p = self._parts
        self._drop()
        self._transactor = p.bus.transactor(p.transactional_id)
        faults.point("learner.after_fence")
        head = newest.head(p.bus, p.topics["weights"], p.topics["ledger"])
        if head is None:
            raise LearnerError("the policy has no version: `millrace policy create --model DIR` writes version 0")
        return head

    def _commit(self, event: WeightVersion, entry: LedgerEntry, offsets: Mapping[int, int]) -> str | None:
        """Why it did not happen, or None. offsets: next of each partition of trajectories."""
        p = self._parts
        assert self._transactor is not None, "closed"
        try:
            commit_version(
                self._transactor,
                event,
                entry,
                {(p.topics["trajectories"], partition): offset for partition, offset in offsets.items()},
                self._token,
                weights_topic=p.topics["weights"],
                ledger_topic=p.topics["ledger"],
            )
        except (RefusedError, FencedError) as error:
            return f"the commit of version {event['version']} was refused: {error}"
        except UnreachableError as error:
            return self._settle(entry, str(error))
        return None

    def _settle(self, entry: LedgerEntry, reason: str) -> str | None:
        """The outcome of a commit is unknown: fence again and read what is there."""
        try:
            head = self._fence()
        except BusError as error:
            return f"the outcome of version {entry['version']} is unknown ({reason}; then {error})"
        if head.entry["hash"] == entry["hash"]:
            return None
        return f"version {entry['version']} was not committed: {reason}"

    def _collect(self) -> None:
        p, keep = self._parts, self._parts.settings.learner.keep
        every = p.settings.learner.keep_every
        for_good = self.head.version // every if every else 0
        if sum(1 for _ in p.root.iterdir()) > keep + for_good + SPARE:
            with p.backend.clock.phase("collect"):
                if self._collection is not None:
                    self._collection.result()
                try:
                    serving = serving_versions(p.bus, p.workers_topic, p.settings.policy.name, now_micros())
                    digests = self.log.all_digests(self.head.version)
                except UnreachableError as error:  # also while a generation ends; a later version collects
                    p.observer.warn(f"no former version is collected now: {error}")
                    return
                self._collection = self._writer.submit(
                    collect,
                    p.root,
                    digests,
                    keep=keep,
                    serving=serving,
                    deltas=self.log.deltas(digests),
                    every=every,
                )


def _timings(so_far: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Where the time since the last version went, by phase, and the rate. What the thread took that writes and commits
    is in timings_beside_copy (until the state was in main memory), timings_beside_checkpoint and, of the former commit,
    timings_beside_commit, which no total counts."""
    out = {name: value for name, value in so_far.items() if name.startswith("timings_") and name != "timings_step"}
    for name, value in seconds.items():
        out[f"timings_{name}"] = out.get(f"timings_{name}", 0.0) + value
    total = sum(out.values())
    busy = total - out.get("timings_wait", 0.0)
    tokens = so_far.get("tokens_computed", 0.0)
    return {**out, "timings_total": total, "tokens_per_second": tokens / busy if busy > 0 else 0.0}
