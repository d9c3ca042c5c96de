"""The worker: grants in by consumer group, episodes out through the gateway.

Invariants: the group's offset of a partition is the lowest grant that has not finished here, so whoever takes over runs
it again; a ticket that is resolved already is skipped; commits carry the membership of the poll that read the grants,
so a worker that lost a partition cannot move it; of the grants that it has read the lowest ticket begins first,
whatever partition it lies in, since versions are made in the order of tickets; the member of partition 0 of the grants
also loads the tasks.

One thread polls, commits and follows the resolutions; the episodes run in the event loop."""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from millrace.infra import faults
from millrace.infra.errors import AccessError, BusError, FencedError, RefusedError, RolloutError
from millrace.infra.log.base import EARLIEST, Bus, Member, Record, Tail, Transactor
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.readable import passed_over, readable
from millrace.infra.log.topics import full_name
from millrace.producers.rollout.episodes import Runner
from millrace.producers.tasks.loader import LoaderThread
from millrace.schemas import bounds
from millrace.schemas.records import Grant, Resolution


class GrantProgress:
    """Grants by partition, in the order they were read."""

    def __init__(self) -> None:
        self._running: dict[int, dict[int, bool]] = {}
        self._next: dict[int, int] = {}

    def begin(self, partition: int, offset: int) -> None:
        """A grant was read."""
        self._running.setdefault(partition, {})[offset] = False
        self._next[partition] = offset + 1

    def finish(self, partition: int, offset: int) -> None:
        """A grant is over, whatever became of it."""
        waiting = self._running.get(partition, {})
        if offset in waiting:
            waiting[offset] = True
            while waiting and waiting[first := next(iter(waiting))]:
                del waiting[first]

    def position(self, partition: int) -> int | None:
        """Next offset to commit; None before anything was read."""
        waiting = self._running.get(partition)
        return next(iter(waiting)) if waiting else self._next.get(partition)

    def forget(self, partition: int) -> None:
        """The partition is another worker's now."""
        self._running.pop(partition, None)
        self._next.pop(partition, None)


logger = logging.getLogger(__name__)

POLL_S = 0.05
COMMIT_S = 0.5

AHEAD, AHEAD_BYTES = 1000, 16 << 20
"""grants that are read before there is room for them, at most: Kafka gives one partition's in bulk"""

FAR = 64 << 20
"""bytes of bits that one ticket may add: half a billion tickets, and no more memory than that"""

Key = tuple[int, int]
"""ticket and round of a grant"""


@dataclass(frozen=True, slots=True)
class Names:
    """What one worker of one policy is called in the log."""

    namespace: str
    policy: str
    worker: str

    @property
    def grants(self) -> str:
        """Full name of the topic of grants."""
        return full_name(self.namespace, f"{self.policy}.grants")

    @property
    def resolutions(self) -> str:
        """Full name of the topic of resolutions."""
        return full_name(self.namespace, f"{self.policy}.resolutions")

    @property
    def group(self) -> str:
        """The consumer group of all workers of the policy."""
        return f"{self.namespace}.{self.policy}.rollout"


class ResolvedTickets:
    """Which tickets are resolved, one bit each: tickets are dense."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, ticket: int) -> bool:
        """A ticket is resolved; False for one that can be none, so far is it from those before."""
        at = ticket >> 3
        if at >= len(self._bits) + FAR:
            return False
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 1024 - len(self._bits)))
        self._bits[at] |= 1 << (ticket & 7)
        return True

    def __contains__(self, ticket: int) -> bool:
        at = ticket >> 3
        return at < len(self._bits) and bool(self._bits[at] >> (ticket & 7) & 1)


class RolloutWorker:
    """One rollout worker. `loader` runs while this worker owns partition 0 of the grants."""

    def __init__(
        self,
        bus: Bus,
        names: Names,
        runner: Runner,
        loader: LoaderThread | None = None,
        claims: ClaimStore | None = None,
    ) -> None:
        self.bus = bus
        self.claims = claims
        self.names = names
        self.runner = runner
        self.loader = loader
        self.progress = GrantProgress()
        self.resolved = ResolvedTickets()
        self._stop = threading.Event()
        self._running: dict[Key, Future[None]] = {}
        self._places: dict[Key, list[tuple[GrantProgress, int, int]]] = {}
        """where the grants lie that end with each; one more after a membership that was lost"""
        self._line: list[tuple[int, int, int, Record]] = []
        """(ticket, partition, offset, record) of grants that are read and not begun, a heap"""
        self._samples_running = 0
        self._largest_grant = 1
        self._committed: dict[int, int] = {}
        self._lock = threading.Lock()

    async def run(self, stop: asyncio.Event, grace_s: float = 10.0) -> None:
        """Work until `stop`; then finish what runs, up to `grace_s`, and leave the rest to the next owner."""
        loop = asyncio.get_running_loop()
        stopping = asyncio.create_task(stop.wait())
        polling = asyncio.create_task(asyncio.to_thread(self._work, loop, grace_s))
        try:
            await asyncio.wait((stopping, polling), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop.set()
            stopping.cancel()
            await polling

    # ------------------------------------------------------------------ the polling thread

    def _work(self, loop: asyncio.AbstractEventLoop, grace_s: float) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._session(loop, grace_s)
                except AccessError:
                    raise
                except BusError as error:
                    logger.warning("the worker joins again in 1 s: %s", error)
                    self._stop.wait(1.0)
        finally:
            if self.loader is not None:
                self.loader.stop()

    def _session(self, loop: asyncio.AbstractEventLoop, grace_s: float) -> None:
        """One membership, until it fails or the worker stops."""
        self.progress, self._committed, self._line = GrantProgress(), {}, []
        with (
            self.bus.tail({(self.names.resolutions, 0): EARLIEST}) as tail,
            self.bus.transactor(f"{self.names.group}.{self.names.worker}") as transactor,
            self.bus.member(
                self.names.group,
                self.names.grants,
                client_id=self.names.worker,
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
            ) as member,
        ):
            while self._follow(tail, 0.2):
                pass
            since_commit_s = 0.0
            trouble = self.runner.trouble
            while not (self._stop.is_set() or trouble.is_worn):
                since_commit_s = self._turn(loop, member, tail, transactor, since_commit_s)
            self._drain(member, transactor, grace_s)
            if not self._stop.is_set():
                raise RolloutError(
                    f"{len(trouble.stuck)} calls of the agent never returned and keep threads: this worker ends, to be "
                    "started anew; give what the agent waits for a timeout below [rollout] timeout_s"
                )

    def _turn(
        self, loop: asyncio.AbstractEventLoop, member: Member, tail: Tail, transactor: Transactor, since_commit_s: float
    ) -> float:
        """One poll, as many grants as there is room for, and a commit when one is due. Gives the seconds polled since
        the last commit."""
        if self.loader is not None and self.loader.failed is not None:
            raise self.loader.failed
        is_broken = self.runner.trouble.is_broken
        partitions = member.assignment()
        if self.loader is not None and 0 in partitions:  # tasks that nobody can do are not handed out
            self.loader.stop() if is_broken else self.loader.start()
        if len(self._line) < AHEAD and sum(len(record.value or b"") for *_, record in self._line) < AHEAD_BYTES:
            member.resume(partitions)
        else:
            member.pause(partitions)
        for record in member.poll(AHEAD // 10, POLL_S):
            self._read(record)
        # An agent that is broken gets one grant at a time, to try it.
        room = int(not self._samples_running) if is_broken else self.runner.concurrency - self._samples_running
        if self._line and room > 0:
            self._follow(tail, 0.0)
            for _ in range(min(len(self._line), max(1, room // self._largest_grant))):
                self._take(loop, heapq.heappop(self._line)[-1])
        since_commit_s += POLL_S
        if since_commit_s >= COMMIT_S:
            self._commit(member, transactor)
            since_commit_s = 0.0
        return since_commit_s

    def _read(self, record: Record) -> None:
        key = record.key
        ticket = int(key) if key.isdigit() and len(key) <= len(str(bounds.VERSION)) else 0
        heapq.heappush(self._line, (ticket, record.partition, record.offset, record))
        with self._lock:
            self.progress.begin(record.partition, record.offset)

    def _take(self, loop: asyncio.AbstractEventLoop, record: Record) -> None:
        grant = self._grant(record)
        partition, offset = record.partition, record.offset
        with self._lock:
            if grant is None or grant["ticket"] in self.resolved:
                self.progress.finish(partition, offset)
                return
            key, samples = (grant["ticket"], grant["round"]), len(grant["samples"])
            places = self._places.setdefault(key, [])
            places.append((self.progress, partition, offset))
            if len(places) > 1:  # still running from a membership that was lost
                return
            self._samples_running += samples
        self._largest_grant = max(self._largest_grant, samples)
        future = self._running[key] = asyncio.run_coroutine_threadsafe(self.runner.group(grant), loop)
        future.add_done_callback(lambda group_future: self._end_grant(key, samples, group_future))

    def _grant(self, record: Record) -> Grant | None:
        """The grant in a record; None, named in the log of this process, for one that nobody can run: its lease ends
        it."""
        grant = readable(Grant, record, self.claims)
        if grant is None:
            return None
        fault = None
        try:
            if not isinstance(json.loads(grant["task"]), dict):
                fault = "its task is no JSON object"
        except (ValueError, RecursionError):
            fault = "its task is no JSON that can be read"
        if any(not 0 <= sample < grant["group_size"] for sample in grant["samples"]):
            fault = "it asks for samples that its group has not"
        if fault is not None:
            passed_over(record, fault)
            return None
        return grant

    def _end_grant(self, key: Key, samples: int, group_future: Future[None]) -> None:
        """In one go: who finds nothing running commits what is finished."""
        error = None if group_future.cancelled() else group_future.exception()
        if error is not None:
            logger.error("ticket %d: the worker's own error", key[0], exc_info=error)
        with self._lock:
            for progress, partition, offset in self._places.pop(key):
                # An error of ours would only come again with the same grant: its lease ends it, and nobody waits.
                if not group_future.cancelled():
                    progress.finish(partition, offset)
            self._running.pop(key, None)
            self._samples_running -= samples

    def _follow(self, tail: Tail, timeout_s: float) -> int:
        records = tail.poll(2000, timeout_s)
        for record in records:
            resolution = readable(Resolution, record, self.claims)
            if resolution is None or not resolution["solicited"] or resolution["ticket"] is None:
                continue
            if not self.resolved.add(resolution["ticket"]):
                passed_over(record, "its ticket is far beyond all others")
        return len(records)

    def _commit(self, member: Member, transactor: Transactor) -> None:
        with self._lock:
            positions = {p: at for p in member.assignment() if (at := self.progress.position(p)) is not None}
        changes = {p: at for p, at in positions.items() if self._committed.get(p) != at}
        if not changes:
            return
        transactor.begin()
        faults.point("rollout.before_commit")
        try:
            transactor.commit({(self.names.grants, p): at for p, at in changes.items()}, member.token())
        except RefusedError:
            return  # the group moved on; the next poll says what is still ours
        faults.point("rollout.committed")
        self._committed.update(changes)

    def _drain(self, member: Member, transactor: Transactor, grace_s: float) -> None:
        rest_s = grace_s
        while self._running and rest_s > 0:
            member.pause(member.assignment())
            member.poll(1, POLL_S)
            rest_s -= POLL_S
        for future in list(self._running.values()):
            future.cancel()
        try:
            self._commit(member, transactor)
        except FencedError:
            return

    def _on_assign(self, partitions: set[int]) -> Mapping[int, int] | None:
        if self.loader is not None and 0 in partitions:
            self.loader.start()
        return None

    def _on_revoke(self, partitions: set[int]) -> None:
        self._line = [one for one in self._line if one[1] not in partitions]
        heapq.heapify(self._line)
        with self._lock:
            for partition in partitions:
                self.progress.forget(partition)
                self._committed.pop(partition, None)
        if self.loader is not None and 0 in partitions:
            self.loader.stop()
