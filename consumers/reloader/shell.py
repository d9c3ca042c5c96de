"""The reloader: follows the policy's weight events and keeps one engine on the newest, and says so in `workers`.

Invariants: one look at the engine precedes each decision of the core; a version is acknowledged only for the
incarnation that loaded it; the status is renewed well within its time to live while the engine answers, and
withdrawn as soon as it is known to be dead. An engine that does not answer is waited for."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

from consumers.reloader import adapter
from consumers.reloader.control import EngineControl, EngineState, PauseMode
from consumers.reloader.core import Condemn, Idle, Machine, Swap
from consumers.reloader.directory import Signature, check
from consumers.reloader.swap import freeze, swap
from consumers.reloader.transport import Directory, WeightTransport
from infra import faults
from infra.bus.base import EARLIEST, Bus, Outgoing, Publisher, Tail
from infra.errors import EngineError, EngineUnavailable, ReloadError, UnreachableError
from infra.labels import make_label
from infra.topics import full_name
from schemas import codec
from schemas.ids import now_micros
from schemas.records import WeightVersion, WorkerState, WorkerStatus

log = logging.getLogger(__name__)

ADAPTER = "adapter"
"""mode of a version that is an adapter"""
LOOK_S = 1.0
TTL_S = 6.0
BEAT_S = 2.0
ACKNOWLEDGE_S = 2.0
"""how long a swap waits for the log: serving goes on without it, and the next heartbeat acknowledges"""

Restart = Callable[[], int | None]


class Reloader:
    """Keeps the engine behind `control` on the newest version of `policy`.

    `worker` is the engine's stable name; `restart` ends an engine that cannot be trusted any more and returns its pid
    (None: there is nobody here to do so, and the engine stays paused); `transport`: how weights reach the engine (None:
    from their own directories); `keep`: adapters that requests may need; `interrupt`: what becomes of requests
    under way while weights change."""

    def __init__(
        self,
        bus: Bus,
        control: EngineControl,
        *,
        namespace: str,
        policy: str,
        worker: str,
        restart: Restart | None = None,
        transport: WeightTransport | None = None,
        keep: int = 4,
        interrupt: PauseMode = "keep",
    ) -> None:
        self._bus = bus
        self._control = control
        self._weights = full_name(namespace, f"{policy}.weights")
        self._workers = full_name(namespace, "workers")
        self._worker = worker
        self._restart = restart
        self._transport = transport or Directory()
        self._keep = keep
        self._interrupt: PauseMode = interrupt
        self._adapters: Signature | None = None
        self._publisher: Publisher = bus.publisher()
        self._machine = Machine(policy)
        self._reference: Signature | None = None
        self._beat_at = 0.0
        self._alive = False

    @property
    def served(self) -> int | None:
        """The version that the engine serves now, as far as is known."""
        return self._machine.served if self._machine.trusted else None

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Leaves the engine as it is, and its status to lapse: a reloader that comes back in time
        interrupts nothing. BusError and whatever is unexpected propagate: whoever starts this process starts it again,
        and nothing depends on what it knew."""
        records = await asyncio.to_thread(lambda: list(self._bus.read(self._weights, 0)))
        for record in records:
            self._learn(record.value)
        tail = self._bus.tail({(self._weights, 0): records[-1].offset + 1 if records else EARLIEST})
        try:
            while not stop.is_set():
                await self._turn()
                await self._wait(tail)
        finally:
            tail.close()
            self._publisher.close()

    # ------------------------------------------------------------------ one turn

    async def _turn(self) -> None:
        """Look, act until there is nothing to do, and renew the status."""
        try:
            await self._look()
            while True:
                match self._machine.next(time.monotonic()):
                    case Idle():
                        break
                    case Swap(version):
                        await self._swap(version)
                    case Condemn():
                        await self._condemn()
                        break
        except EngineUnavailable as error:
            await self._lost(error)
            return
        except EngineError as error:
            log.warning("%s: %s; trying again", self._worker, error)
        if time.monotonic() >= self._beat_at:
            await self._say(self._standing())

    async def _look(self) -> None:
        state = await self._control.state()
        if self._machine.see(state):
            log.info("%s: incarnation %s with label %s", self._worker, state.incarnation, state.label)
            await self._say(self._standing())
            await self._withdraw_former(state.incarnation)
        elif not self._alive:
            await self._say(self._standing())
        self._alive = True

    async def _swap(self, version: int) -> None:
        event = self._machine.events[version]
        if event["mode"] == ADAPTER:
            await self._add(event)
            return
        try:
            ready = await self._transport.prepare(self._control, event, self._machine.events, self._reference)
        except ReloadError as error:
            await self._leave(version, error)
            return
        faults.point("reloader.after_verify")
        began = time.monotonic()
        await freeze(self._control, self._interrupt)
        await adapter.clear(self._control)
        label = make_label(self._machine.policy, version)
        if not await self._loads(version, swap(self._control, ready.load, label, self._acknowledger(version))):
            return
        if self._reference is None:
            self._reference = ready.signature
        await self._transport.loaded(version)
        log.info("%s: serves version %d after %.0f ms", self._worker, version, (time.monotonic() - began) * 1000)
        await self._say(self._standing())

    async def _add(self, event: WeightVersion) -> None:
        """Serve a version that is an adapter. Nothing is paused but to lay its base, once in an engine's life."""
        version, began = event["version"], time.monotonic()
        label = make_label(self._machine.policy, version)
        try:
            folder, found = await asyncio.to_thread(check, event, self._adapters)
            base = await asyncio.to_thread(adapter.base_of, folder)
            if reason := await self._control.refusal(base.folder):
                raise ReloadError(reason)
            faults.point("reloader.after_verify")
            if not adapter.carries(await self._control.state(), base):
                await freeze(self._control, self._interrupt)
                if not await self._loads(version, adapter.lay(self._control, base)):
                    return
            await self._control.load_adapter(label, folder)
        except EngineUnavailable:
            raise
        except (EngineError, ReloadError) as error:
            await self._leave(version, error)
            return
        self._adapters = found
        await self._acknowledger(version)()
        names = await self._control.adapters()
        for name in adapter.outdated(names, self._machine.policy, version, self._keep):
            await self._control.unload_adapter(name)
        log.info("%s: serves adapter %d after %.0f ms", self._worker, version, (time.monotonic() - began) * 1000)
        await self._say(self._standing())

    async def _leave(self, version: int, error: Exception) -> None:
        """A version cannot be had, and the engine was not touched."""
        log.warning("%s: version %d is not loaded: %s", self._worker, version, error)
        self._machine.unfit(version, str(error), time.monotonic())
        await self._say(self._standing())

    async def _loads(self, version: int, work: Coroutine[Any, Any, None]) -> bool:
        """Whether `work` could change the weights of the frozen engine."""
        try:
            await self._beating(work)
        except EngineUnavailable:
            raise
        except (EngineError, ReloadError) as error:
            log.warning("%s: version %d failed to load: %s", self._worker, version, error)
            self._machine.failed(version, str(error), time.monotonic())
            await self._say("failed")
            return False
        return True

    async def _beating(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, renewing the status meanwhile: a load may take minutes."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((task,), timeout=BEAT_S))[0]:
                await self._say("loading")
        finally:
            task.cancel()
        await task

    def _acknowledger(self, version: int) -> Callable[[], Awaitable[None]]:
        async def acknowledge() -> None:
            state: EngineState = await self._control.state()
            if state.incarnation != self._machine.incarnation:
                raise EngineUnavailable(f"{self._control.url} restarted while version {version} was loaded")
            self._machine.loaded(version)
            await self._say("loaded")

        return acknowledge

    async def _condemn(self) -> None:
        await self._say("failed")
        pid = await asyncio.to_thread(self._restart) if self._restart is not None else None
        if pid is None:
            log.error("%s cannot be trusted after two failed loads: restart it", self._worker)
        else:
            log.error("%s could not be trusted after two failed loads: ended its process %d", self._worker, pid)

    async def _lost(self, error: EngineUnavailable) -> None:
        """The engine does not answer: nobody may route to it until it is looked at again."""
        if self._alive:
            log.warning("%s is gone, waiting for it: %s", self._worker, error)
            await self._say("stopped")
        self._alive = False

    async def _wait(self, tail: Tail) -> None:
        """Until there are weight events, or it is time to look again."""
        try:
            records = await asyncio.to_thread(tail.poll, 1000, LOOK_S)
        except UnreachableError as error:
            log.warning("%s: the log does not answer: %s", self._worker, error)
            await asyncio.sleep(LOOK_S)
            return
        for record in records:
            self._learn(record.value)

    def _learn(self, value: bytes | None) -> None:
        if value is not None:
            self._machine.learn(cast(WeightVersion, codec.decode_as("WeightVersion", value)))

    # ------------------------------------------------------------------ status

    def _standing(self) -> WorkerState:
        machine = self._machine
        if machine.condemned or machine.failures:
            return "failed"
        if machine.trusted:
            return "serving"
        return "failed" if machine.error else "starting"

    async def _say(self, state: WorkerState) -> None:
        """Renew the status, waiting a little for the log."""
        incarnation = self._machine.incarnation
        if incarnation is None:
            return
        version = self._machine.served if state in ("loading", "loaded", "serving") else None
        label = make_label(self._machine.policy, version) if version is not None else None
        now = now_micros()
        status: WorkerStatus = {
            "worker": self._worker,
            "incarnation": incarnation,
            "role": "engine",
            "state": state,
            "policy": self._machine.policy,
            "version": version,
            "label": label,
            "adapter": label if version is not None and self._machine.events[version]["mode"] == ADAPTER else None,
            "url": self._control.url,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "error": self._machine.error,
            "expires_at": now + int(TTL_S * 1e6),
            "time": now,
        }
        await self._publish(incarnation, codec.encode("WorkerStatus", status))
        self._beat_at = time.monotonic() + BEAT_S

    async def _withdraw_former(self, incarnation: str) -> None:
        """Take back what was said of former starts of this engine, so that `workers` keeps one status of it."""
        records = await asyncio.to_thread(lambda: list(self._bus.read(self._workers, 0)))
        last = {record.key.decode().rpartition("/"): record.value for record in records}
        for (worker, _, former), value in last.items():
            if worker != self._worker or former == incarnation or value is None:
                continue
            # An engine of another policy may have this address too, on a machine of its own.
            if codec.decode_as("WorkerStatus", value)["policy"] == self._machine.policy:
                await self._publish(former, None)

    async def _publish(self, incarnation: str, value: bytes | None) -> None:
        sent = self._publisher.publish(Outgoing(self._workers, f"{self._worker}/{incarnation}".encode(), value))
        # not wait_for: giving up must not cancel a record that is under way
        done, _ = await asyncio.wait((asyncio.wrap_future(sent),), timeout=ACKNOWLEDGE_S)
        if not done:
            log.warning("%s: the log does not take our status yet", self._worker)
        for future in done:
            if isinstance(error := future.exception(), UnreachableError):
                log.warning("%s: the log does not take our status: %s", self._worker, error)
            else:
                future.result()
