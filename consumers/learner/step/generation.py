"""One generation of learners: the ranks of one roster, from meeting to tearing down.

    meet (rank 0 fences first) -> form -> load -> { boundary -> step -> publish } until an order ends it

Invariants: all ranks load the same version from its directory, without collectives; the consumer is polled at
boundaries only; batch k is trained from version k; the ranks of a cell train the same groups, so what one of them
cannot read is lost to all; ranks that serve a role read none, since what they compute comes from the others; a step
that was not committed is forgotten with the whole generation.
"""

from __future__ import annotations

from millrace.consumers.learner.group import rank_numbers
from millrace.consumers.learner.group.agreement import Roster
from millrace.consumers.learner.group.rendezvous import Meeting
from millrace.consumers.learner.step import mismatch, next_work
from millrace.consumers.learner.step.leader import Leader, Step
from millrace.consumers.learner.step.next_work import NextWork, Regroup, Stop, Train, Wait
from millrace.consumers.learner.step.parts import Parts
from millrace.consumers.learner.step.reading import REASONS, ages, read
from millrace.consumers.learner.version.collect import newer
from millrace.consumers.learner.version.order import Batch
from millrace.consumers.learner.version.records import histogram
from millrace.infra import faults
from millrace.infra.errors import RegroupError
from millrace.infra.log.base import MemberToken
from millrace.infra.log.history.newest import Head
from millrace.infra.versions import directory
from millrace.trainers.errors import CheckpointError
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State

IDLE_S = (0.03, 0.12)
"""how long a boundary without work waits: the first, and those after many"""


class Generation:
    """The ranks of `roster` at work. Tear the backend down after `run` and `close`, whatever happened."""

    def __init__(self, parts: Parts, roster: Roster, token: MemberToken) -> None:
        self._parts = parts
        self._roster = roster
        self._token = token
        self._rank = roster.rank
        self._leader: Leader | None = None
        self.version = -1
        """of the weights that this rank holds, -1 before any"""
        self.stepped = False
        """whether it came past a step"""
        self._batch: Batch | None = None
        self._cells: list[int] = []
        """by rank, SERVES for those that serve a role"""
        self._idle_s = IDLE_S[0]

    def run(self) -> Regroup | Stop:
        """Work until an order ends this generation.

        Raises RegroupError when it broke and RefusedMember when this process must not train with the others. In a world
        above 1, RuntimeError and BusError mean the same as RegroupError."""
        self._start()
        with self._parts.backend.clock.phase("loop"):
            while True:
                order = self._decide()
                if isinstance(order, Train):
                    self._train(order)
                elif not isinstance(order, Wait):
                    return order

    def close(self) -> None:
        """Let go of what only this generation may use."""
        leader, self._leader = self._leader, None
        if leader is not None:
            leader.close()

    # ---- start

    def _start(self) -> None:
        p = self._parts
        mismatch.refuse(p, self._roster)
        meeting = Meeting(self._roster, p.store, lambda: p.membership.wait(self._roster))
        if self._rank == 0:
            try:
                self._leader = Leader(p, self._roster, self._token)
                p.observer.on_phase("fenced")
                head = self._leader.head
                meeting.lead(head)
            except BaseException:
                meeting.call_off()
                raise
        else:
            head = meeting.follow()
        p.observer.on_phase("met")
        p.backend.form(self._rank, self._roster.world, meeting.store, p.timeout_s)
        p.observer.on_phase("formed")
        self._cells = rank_numbers.cells(p.backend)
        p.trainer.load(self._read(head))
        self.version = head.version
        p.observer.on_weights(self.version)
        p.backend.clock.drain()
        p.observer.on_phase("loaded")

    def _read(self, head: Head) -> State:
        """The version that this generation begins with. Raises RegroupError when the others went on from it while this
        process was stopped, so far that they collected it."""
        p = self._parts
        try:
            return checkpoint.read(directory(head.weights, p.root), digest=head.weights["digest"])
        except (CheckpointError, OSError):
            if newer(p.bus, p.topics, head, p.root) is None:
                raise
        raise RegroupError(f"version {head.version} was collected before this rank had read it")

    # ---- boundary

    def _decide(self) -> NextWork:
        p = self._parts
        with p.backend.clock.phase("boundary"):
            p.membership.poll()
            moves, stopping = rank_numbers.count(p.backend, [not p.membership.holds(self._roster), p.stopping()])
            message = next_work.encode(self._lead(self._leader, moves > 0, stopping)) if self._leader else None
            order = next_work.decode(p.backend.announce(message))
        if isinstance(order, Wait):
            with p.backend.clock.phase("wait"):
                p.membership.poll(self._idle_s)
            self._idle_s = min(2 * self._idle_s, IDLE_S[1])
        else:
            self._idle_s = IDLE_S[0]
        return order

    def _lead(self, leader: Leader, has_moved: bool, stopping: int) -> NextWork:
        p, most = self._parts, self._parts.settings.learner.max_versions
        leader.settle(wait=has_moved or stopping > 0 or 0 < most <= leader.version)
        urgent = next_work.interrupt(
            has_moved=has_moved,
            stopping=stopping,
            world=self._roster.world,
            failure=leader.failure,
            is_done=0 < most <= leader.head.version,
        )
        if urgent is not None:
            return urgent
        version = leader.version
        self._batch = batch = leader.next_batch()
        if batch is None:
            return Wait()
        oldest = version - batch.eta if leader.log.order.masks_head(batch.seq_lo) else None
        return next_work.manifest(batch, self._roster, self._cells, version, p.trainer.algorithm.minibatches, oldest)

    # ---- step

    def _train(self, train: Train) -> None:
        p, clock = self._parts, self._parts.backend.clock
        if train.version != self.version:
            raise RegroupError(f"this rank holds version {self.version}, rank 0 trains {train.version}")
        with clock.phase("fetch"):
            parts = train.shares[self._cells[self._rank]] if p.backend.acts else []
            share = read(p.reader, parts, vocabulary=p.backend.vocabulary, longest=p.backend.longest)
            codes = rank_numbers.worst(p.backend, next_work.lost_codes(train, share.losses))
            losses = {seq: REASONS[code] for seq, code in enumerate(codes, train.seq_lo) if code}
            samples = [sample for sample in share.samples if sample.seq not in losses]
        for detail in share.details:
            p.observer.warn(detail)
        before = clock.drain()
        report = p.trainer.train(samples, minibatches=train.minibatches, version=train.version, oldest=train.oldest)
        faults.point("learner.after_step")
        by_age = p.backend.sum(ages(samples, train.version))
        finish = p.backend.begin_gather()
        faults.point("learner.after_gather")
        self.version += 1
        self.stepped = True
        p.observer.on_weights(self.version)
        if self._leader is None or self._batch is None or finish is None:
            clock.drain()
            return
        report.metrics.update(histogram(by_age))
        for name, seconds in before.items():
            key = f"timings_{name}"
            report.metrics[key] = report.metrics.get(key, 0.0) + seconds
        self._leader.publish(Step(self._batch, finish, report, losses, self._cells, next_work.cells_of(train)))
