"""What `workers` says of one engine: which version it serves, that it is being loaded, that it does not answer yet, or
that it failed; what it has to do, and whether it was told to stop.

Invariants: a status is renewed well within its time to live; an engine that is known to be dead is said to be stopped
at once; one engine has one status, that of its present incarnation; a log that does not answer delays a swap by
`ACKNOWLEDGE_S` at most."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from millrace.consumers.reloader.core import ReloaderState
from millrace.infra.engines.control import EngineLoad
from millrace.infra.errors import UnreachableError
from millrace.infra.log.base import Bus, Outgoing, Publisher
from millrace.infra.log.history.kinds import WORKERS
from millrace.infra.log.history.reader import History, left_out
from millrace.infra.workers import DRAIN, ENGINE, status
from millrace.schemas.records import WorkerState

log = logging.getLogger(__name__)

UNSEEN = "unseen"
"""the incarnation of an engine that has not answered this reloader yet"""
ADAPTER = "adapter"
"""mode of a version that is an adapter"""
DRAIN_NOTE = "drained: it has no calls; its next start takes calls again, as it does after `millrace drain NAME --undo`"
TTL_S = 6.0
BEAT_S = 2.0
ACKNOWLEDGE_S = 2.0
"""how long a swap waits for the log: serving goes on without it, and the next heartbeat acknowledges"""


class Status:
    """The status of the engine at `url`, of a `kind`, whose stable name is `worker`, as `machine` knows it. `load`:
    what it has to do; `is_draining`: it was told to stop; `is_drained`: and has no calls any more."""

    def __init__(
        self, bus: Bus, machine: ReloaderState, *, namespace: str, worker: str, url: str, kind: str | None = None
    ) -> None:
        self.load: EngineLoad | None = None
        self.is_draining = self.is_drained = False
        self._history = History(bus, namespace, machine.policy)
        self._machine = machine
        self._workers = self._history.names[WORKERS]
        self._worker = worker
        self._url = url
        self._kind = kind
        self._publisher: Publisher = bus.publisher()
        self._beat_at = 0.0
        self._loaded = False

    @property
    def is_due(self) -> bool:
        """Whether it is time to renew it."""
        return time.monotonic() >= self._beat_at

    async def renew(self) -> None:
        """Say how the engine stands between loads."""
        machine = self._machine
        if self.is_drained:
            await self.say("stopped", DRAIN_NOTE)
        elif machine.is_condemned or machine.failures:
            await self.say("failed")
        elif machine.is_trusted:
            await self.say("serving")
        else:
            await self.say("failed" if machine.error else "starting")

    async def loading(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, saying so meanwhile: a load may take minutes. Once `work` has said "loaded", that stands."""
        task = asyncio.ensure_future(work)
        self._loaded = False
        try:
            while not (await asyncio.wait((task,), timeout=BEAT_S))[0]:
                await self.say("loaded" if self._loaded else "loading")
        finally:
            task.cancel()
        await task

    async def say(self, state: WorkerState, error: str | None = None) -> None:
        """Publish a status, waiting a little for the log. error: what is wrong; None: what the reloader knows of."""
        self._loaded = state == "loaded"
        version = self._machine.served if state in ("loading", "loaded", "serving") else None
        outgoing = status(
            self._workers,
            worker=self._worker,
            incarnation=self._machine.incarnation or UNSEEN,
            role=ENGINE,
            state=state,
            policy=self._machine.policy,
            lives_s=TTL_S,
            version=version,
            adapter=version is not None and self._machine.events[version]["mode"] == ADAPTER,
            url=self._url,
            error=error or self._machine.error,
            kind=self._kind,
            load=self.load,
            draining=self.is_draining,
        )
        await self._publish(outgoing)
        self._beat_at = time.monotonic() + BEAT_S

    async def withdraw_former(self, incarnation: str) -> None:
        """Take back what was said of former starts of this engine, so that `workers` keeps one status of it."""
        statuses = await asyncio.to_thread(self._history.newest_by_key, WORKERS)
        for key, record in statuses.items():
            place = key.decode("utf-8", "replace").removesuffix(f"/{DRAIN}")
            worker, _, former = place.rpartition("/")
            if worker != self._worker or former == incarnation:
                continue
            # An engine of another policy may have this address too, on a machine of its own.
            row = self._history.row(WORKERS, record, left_out)
            if row is not None and row["policy"] == self._machine.policy:
                await self._publish(Outgoing(self._workers, key, None))

    def close(self) -> None:
        """Give the log back; what was said stands until it lapses."""
        self._publisher.close()

    async def _publish(self, outgoing: Outgoing) -> None:
        publication = self._publisher.publish(outgoing)
        # not wait_for: giving up must not cancel a record that is under way
        futures, _ = await asyncio.wait((asyncio.wrap_future(publication),), timeout=ACKNOWLEDGE_S)
        if not futures:
            log.warning("%s: the log does not take our status yet", self._worker)
        for future in futures:
            if isinstance(error := future.exception(), UnreachableError):
                log.warning("%s: the log does not take our status: %s", self._worker, error)
            else:
                future.result()
