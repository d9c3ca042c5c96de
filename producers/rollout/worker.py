"""The worker: grants in by consumer group, episodes out through the gateway.

Invariants: the group's offset of a partition is the lowest grant that has not finished here; a ticket that is resolved
already is skipped; commits carry the membership of the poll that read the grants, so a worker that lost a partition
cannot move it; the member of partition 0 of the grants also loads the tasks.

One thread polls, commits and follows the resolutions; the episodes run in the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from infra import faults
from infra.bus.base import EARLIEST, Bus, Member, Record, Tail, Transactor
from infra.errors import AccessError, BusError, FencedError, RefusedError
from infra.topics import full_name
from producers.rollout.episodes import Runner
from producers.rollout.progress import Progress
from producers.tasks.loader import LoaderThread
from schemas import codec

logger = logging.getLogger(__name__)

POLL_S = 0.05
COMMIT_S = 0.5

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


class Tickets:
    """Which tickets are resolved, one bit each: tickets are dense."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, ticket: int) -> None:
        """A ticket is resolved."""
        at = ticket >> 3
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 1024 - len(self._bits)))
        self._bits[at] |= 1 << (ticket & 7)

    def __contains__(self, ticket: int) -> bool:
        at = ticket >> 3
        return at < len(self._bits) and bool(self._bits[at] >> (ticket & 7) & 1)


class Worker:
    """One rollout worker. `loader` runs while this worker owns partition 0 of the grants."""

    def __init__(self, bus: Bus, names: Names, runner: Runner, loader: LoaderThread | None = None) -> None:
        self.bus = bus
        self.names = names
        self.runner = runner
        self.loader = loader
        self.progress = Progress()
        self.resolved = Tickets()
        self._stop = threading.Event()
        self._running: dict[Key, Future[None]] = {}
        self._places: dict[Key, list[tuple[Progress, int, int]]] = {}
        """where the grants lie that end with each; one more after a membership that was lost"""
        self._samples = 0
        self._largest = 1
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
        self.progress, self._committed = Progress(), {}
        with (
            self.bus.tail({(self.names.resolutions, 0): EARLIEST}) as tail,
            self.bus.transactor(f"{self.names.group}.{self.names.worker}") as transactor,
            self.bus.member(
                self.names.group,
                self.names.grants,
                client_id=self.names.worker,
                on_assign=self._assigned,
                on_revoke=self._revoked,
            ) as member,
        ):
            while self._follow(tail, 0.2):
                pass
            waited = 0.0
            while not self._stop.is_set():
                waited = self._turn(loop, member, tail, transactor, waited)
            self._drain(member, transactor, grace_s)

    def _turn(
        self, loop: asyncio.AbstractEventLoop, member: Member, tail: Tail, transactor: Transactor, waited: float
    ) -> float:
        if self.loader is not None and self.loader.failed is not None:
            raise self.loader.failed
        room = self.runner.concurrency - self._samples
        owned = member.assigned()
        if room > 0:
            member.resume(owned)
        else:
            member.pause(owned)
        records = member.poll(max(1, room // self._largest), POLL_S)
        if records:
            self._follow(tail, 0.0)
        for record in records:
            self._take(loop, record)
        waited += POLL_S
        if waited >= COMMIT_S:
            self._commit(member, transactor)
            waited = 0.0
        return waited

    def _take(self, loop: asyncio.AbstractEventLoop, record: Record) -> None:
        grant = codec.decode_as("Grant", record.value or b"")
        partition, offset = record.partition, record.offset
        with self._lock:
            self.progress.began(partition, offset)
            if grant["ticket"] in self.resolved:
                self.progress.finished(partition, offset)
                return
            key, samples = (grant["ticket"], grant["round"]), len(grant["samples"])
            places = self._places.setdefault(key, [])
            places.append((self.progress, partition, offset))
            if len(places) > 1:  # still running from a membership that was lost
                return
            self._samples += samples
        self._largest = max(self._largest, samples)
        future = self._running[key] = asyncio.run_coroutine_threadsafe(self.runner.group(grant), loop)
        future.add_done_callback(lambda finished: self._ended(key, samples, finished))

    def _ended(self, key: Key, samples: int, finished: Future[None]) -> None:
        """In one go: who finds nothing running commits what is finished."""
        error = None if finished.cancelled() else finished.exception()
        if error is not None:
            logger.error("ticket %d: the worker's own error", key[0], exc_info=error)
        with self._lock:
            for progress, partition, offset in self._places.pop(key):
                if not finished.cancelled() and error is None:
                    progress.finished(partition, offset)
            self._running.pop(key, None)
            self._samples -= samples

    def _follow(self, tail: Tail, timeout_s: float) -> int:
        records = tail.poll(2000, timeout_s)
        for record in records:
            resolution = codec.decode_as("Resolution", record.value or b"")
            if resolution["solicited"] and resolution["ticket"] is not None:
                self.resolved.add(resolution["ticket"])
        return len(records)

    def _commit(self, member: Member, transactor: Transactor) -> None:
        with self._lock:
            positions = {p: at for p in member.assigned() if (at := self.progress.position(p)) is not None}
        moved = {p: at for p, at in positions.items() if self._committed.get(p) != at}
        if not moved:
            return
        transactor.begin()
        faults.point("rollout.before_commit")
        try:
            transactor.commit({(self.names.grants, p): at for p, at in moved.items()}, member.token())
        except RefusedError:
            return  # the group moved on; the next poll says what is still ours
        faults.point("rollout.committed")
        self._committed.update(moved)

    def _drain(self, member: Member, transactor: Transactor, grace_s: float) -> None:
        left = grace_s
        while self._running and left > 0:
            member.pause(member.assigned())
            member.poll(1, POLL_S)
            left -= POLL_S
        for future in list(self._running.values()):
            future.cancel()
        try:
            self._commit(member, transactor)
        except FencedError:
            return

    def _assigned(self, partitions: set[int]) -> Mapping[int, int] | None:
        if self.loader is not None and 0 in partitions:
            self.loader.start()
        return None

    def _revoked(self, partitions: set[int]) -> None:
        with self._lock:
            for partition in partitions:
                self.progress.forget(partition)
                self._committed.pop(partition, None)
        if self.loader is not None and 0 in partitions:
            self.loader.stop()
