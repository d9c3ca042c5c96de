"""The reloader: follows the policy's weight events and keeps one engine on the newest, and says so (`status.py`).

Invariants: one look at the engine precedes each decision of the core; a version is acknowledged only for the
incarnation that loaded it; an engine that does not answer is waited for. An adapter is served on the very weights that
it was trained on (their digest is checked, and the engine's label names it); loading one stops nothing, requests under
way end with the adapter that they began with, and those of the newest versions stay, so that a request that was routed
a moment ago still has its own."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.consumers.reloader.core import Condemn, Idle, ReloaderState, Swap, fault_of
from millrace.consumers.reloader.directory import Signature, check
from millrace.consumers.reloader.status import ADAPTER, Status
from millrace.consumers.reloader.swap import freeze, swap
from millrace.consumers.reloader.transport import SharedDirectory, WeightTransport
from millrace.infra import faults
from millrace.infra.engines.control import EngineControl, EngineState, PauseMode
from millrace.infra.errors import EngineError, EngineTimeout, EngineUnavailable, ReloadError, UnreachableError
from millrace.infra.log.base import Bus
from millrace.infra.log.history.follow import Follower
from millrace.infra.log.history.kinds import WEIGHTS, WORKERS
from millrace.infra.log.history.reader import History, left_out
from millrace.infra.log.history.rows import Row
from millrace.infra.log.readable import passed_over
from millrace.infra.versions import locate
from millrace.infra.workers import DRAIN
from millrace.schemas.labels import base_label, make_label, parse_label
from millrace.schemas.records import WeightVersion, WorkerStatus
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import manifest


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The directory of full weights under an adapter, and their label in an engine."""

    folder: Path
    label: str


def base_of(folder: Path) -> AdapterBase:
    """The base of the adapter in `folder`, checked. Raises ReloadError when it is gone or changed."""
    try:
        about = json.loads((folder / "training.json").read_bytes())["lora"]
        base, digest = folder.parent / about["base"], str(about["digest"])
        base_digest = manifest.base_digest(base)
    except (OSError, ValueError, KeyError, TypeError, CorruptCheckpoint) as error:
        raise ReloadError(f"the base of {folder} cannot be had ({error}); restore it") from error
    if base_digest != digest:
        raise ReloadError(f"{base} is not the base that {folder} was trained on: restore it")
    return AdapterBase(base, base_label(digest))


def carries(state: EngineState, base: AdapterBase) -> bool:
    """Whether an engine serves these very weights, and nobody was interrupted while loading them."""
    return state.base == base.label and not state.paused


async def lay(control: EngineControl, base: AdapterBase) -> None:
    """Replace the weights of an engine by a base, under its label. Adapters on other weights go first."""
    await clear(control)
    await swap(control, lambda: control.load(base.folder), base.label, _acknowledge_nothing)


async def clear(control: EngineControl) -> None:
    """Take every adapter off a frozen engine: its weights are about to change under them."""
    names = await control.adapters()
    for name in names:
        await control.unload_adapter(name)
    if names:
        await control.abort()


def stale_adapters(names: Iterable[str], policy: str, version: int, keep: int) -> list[str]:
    """Adapters of `policy` that no request can need any more, `version` being the newest: all but `keep`."""
    labels = [(name, parse_label(name)) for name in names]
    return [name for name, label in labels if label and label[0] == policy and label[1] <= version - keep]


async def _acknowledge_nothing() -> None:
    """A base is no version: there is nothing to acknowledge."""


log = logging.getLogger(__name__)

LOOK_S = 1.0
MEASURE_S = 1.0
"""how long an engine may take to say what it has to do"""
LEAVE_S = 4.0
"""after which every gateway that hears the log knows that an engine takes no new calls"""

Restart = Callable[[], int | None]


class Reloader:
    """Keeps the engine behind `control` on the newest version of `policy`.

    `worker` is the engine's stable name; `restart` ends an engine that cannot be trusted any more and returns its pid
    (None: there is nobody here to do so, and the engine stays paused); `transport`: how weights reach the engine (None:
    from their own directories); `keep`: adapters that requests may need; `interrupt`: what becomes of requests
    under way while weights change; `root`: where versions lie whose recorded path is not there; `kind`: what kind of
    engine it is; `on_drain`: called once the engine was told to stop and has no calls any more."""

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
        root: str | None = None,
        kind: str | None = None,
        on_drain: Callable[[], None] | None = None,
    ) -> None:
        self._root = root
        self._on_drain = on_drain
        self._drains: set[str] = set()
        """starts of the engine that were told to stop"""
        self._leaves = False
        self._leaves_at = 0.0
        self._history = History(bus, namespace, policy, is_bounded=True)
        self._control = control
        self._worker = worker
        self._restart = restart
        self._transport = transport or SharedDirectory()
        self._keep = keep
        self._interrupt: PauseMode = interrupt
        self._adapters: Signature | None = None
        self._machine = ReloaderState(policy)
        self._status = Status(bus, self._machine, namespace=namespace, worker=worker, url=control.url, kind=kind)
        self._reference: Signature | None = None
        self._alive = False
        self._has_former = False
        """whether statuses of former starts may stand"""

    @property
    def served(self) -> int | None:
        """The version that the engine serves now, as far as is known."""
        return self._machine.served if self._machine.is_trusted else None

    def leave(self) -> None:
        """The engine is about to end: it takes no new calls from now on, as if it was told to stop."""
        self._leaves = True

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Leaves the engine as it is, and its status to lapse: a reloader that comes back in time
        interrupts nothing. BusError and whatever is unexpected propagate: whoever starts this process starts it again,
        and nothing depends on what it knew."""
        follower = await asyncio.to_thread(Follower, self._history, [WEIGHTS])
        requests = await asyncio.to_thread(Follower, self._history, [WORKERS], left_out)
        try:
            for one in (requests, follower):
                for row in await asyncio.to_thread(list, one.catch_up()):
                    self._learn(row)
            while not stop.is_set():
                await self._turn()
                await self._hear(requests, 0.0)
                await self._hear(follower, LOOK_S)
        finally:
            follower.close()
            requests.close()
            self._status.close()

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
            await self._on_loss(error)
            return
        except EngineError as error:
            log.warning("%s: %s; trying again", self._worker, error)
        await self._drain()
        if self._status.is_due:
            await self._measure()
            await self._status.renew()

    async def _measure(self) -> None:
        """What the engine has to do; nobody serves worse where it does not say."""
        try:
            async with asyncio.timeout(MEASURE_S):
                self._status.load = await self._control.occupancy()
        except (EngineError, TimeoutError) as error:
            log.warning("%s does not say what it has to do: %s", self._worker, error or "it takes too long")
            self._status.load = None

    async def _drain(self) -> None:
        """An engine that was told to stop has that said, and is drained once it has no calls any more."""
        status, now = self._status, time.monotonic()
        if (self._leaves or self._machine.incarnation in self._drains) != status.is_draining:
            status.is_draining, status.is_drained = not status.is_draining, False
            self._leaves_at = now + LEAVE_S
            log.info("%s %s", self._worker, "takes no new calls" if status.is_draining else "takes calls")
            faults.point("drain.before_announcement")
            await status.renew()
            faults.point("drain.after_announcement")
        elif status.is_draining and not status.is_drained and now >= self._leaves_at:
            await self._measure()
            if status.load is not None and not (status.load.running or status.load.waiting):
                status.is_drained = True
                log.info("%s is drained", self._worker)
                faults.point("drain.before_end")
                await status.renew()
                faults.point("drain.after_end")
                if self._on_drain is not None:
                    self._on_drain()

    async def _look(self) -> None:
        try:
            state = await self._control.state()
        except EngineTimeout as error:  # it hangs: nobody may route to it
            raise EngineUnavailable(str(error)) from error
        if self._machine.see(state):
            log.info("%s: incarnation %s with label %s", self._worker, state.incarnation, state.label)
            await self._status.renew()
            self._has_former = True
        elif not self._alive:
            await self._status.renew()
        self._alive = True
        if self._has_former:
            await self._withdraw(state.incarnation)

    async def _withdraw(self, incarnation: str) -> None:
        """What former starts said, which lapses by itself where the log does not answer now."""
        try:
            await self._status.withdraw_former(incarnation)
            self._has_former = False
        except UnreachableError as error:
            log.warning("%s: statuses of its former starts stay until the log answers: %s", self._worker, error)

    async def _swap(self, version: int) -> None:
        event = self._machine.events[version]
        if event["mode"] == ADAPTER:
            await self._add(event)
            return
        try:
            delivery = await self._transport.prepare(self._control, event, self._machine.events, self._reference)
        except ReloadError as error:
            await self._leave(version, error)
            return
        faults.point("reloader.after_verify")
        began = time.monotonic()
        await freeze(self._control, self._interrupt)
        await clear(self._control)
        label = make_label(self._machine.policy, version)
        if not await self._loads(version, swap(self._control, delivery.load, label, self._acknowledger(version))):
            return
        if self._reference is None:
            self._reference = delivery.signature
        await self._transport.on_load(version)
        log.info("%s: serves version %d after %.0f ms", self._worker, version, (time.monotonic() - began) * 1000)
        await self._status.renew()

    async def _add(self, event: WeightVersion) -> None:
        """Serve a version that is an adapter. Nothing is paused but to lay its base, once in an engine's life."""
        version, began = event["version"], time.monotonic()
        label = make_label(self._machine.policy, version)
        try:
            folder, signature = await asyncio.to_thread(check, event, self._adapters)
            base = await asyncio.to_thread(base_of, folder)
            if reason := await self._control.refusal(base.folder):
                raise ReloadError(reason)
            faults.point("reloader.after_verify")
            if not carries(await self._control.state(), base):
                await freeze(self._control, self._interrupt)
                if not await self._loads(version, lay(self._control, base)):
                    return
            faults.point("adapter.before_load")
            await self._control.load_adapter(label, folder)
            faults.point("adapter.after_load")
        except EngineUnavailable:
            raise
        except (EngineError, ReloadError) as error:
            await self._leave(version, error)
            return
        self._adapters = signature
        await self._acknowledger(version)()
        faults.point("adapter.after_acknowledge")
        names = await self._control.adapters()
        for name in stale_adapters(names, self._machine.policy, version, self._keep):
            faults.point("adapter.before_unload")
            await self._control.unload_adapter(name)
            faults.point("adapter.after_unload")
        log.info("%s: serves adapter %d after %.0f ms", self._worker, version, (time.monotonic() - began) * 1000)
        await self._status.renew()

    async def _leave(self, version: int, error: Exception) -> None:
        """A version cannot be had, and the engine was not touched."""
        log.warning("%s: version %d is not loaded: %s", self._worker, version, error)
        self._machine.unfit(version, str(error), time.monotonic())
        await self._status.renew()

    async def _loads(self, version: int, work: Coroutine[Any, Any, None]) -> bool:
        """Whether `work` could change the weights of the frozen engine."""
        try:
            await self._status.loading(work)
        except EngineUnavailable:
            raise
        except (EngineError, ReloadError) as error:
            log.warning("%s: version %d failed to load: %s", self._worker, version, error)
            self._machine.note_failure(version, str(error), time.monotonic())
            await self._status.say("failed")
            return False
        return True

    def _acknowledger(self, version: int) -> Callable[[], Awaitable[None]]:
        async def acknowledge() -> None:
            state: EngineState = await self._control.state()
            if state.incarnation != self._machine.incarnation:
                raise EngineUnavailable(f"{self._control.url} restarted while version {version} was loaded")
            self._machine.note_load(version)
            await self._status.say("loaded")

        return acknowledge

    async def _condemn(self) -> None:
        await self._status.say("failed")
        pid = await asyncio.to_thread(self._restart) if self._restart is not None else None
        if pid is None:
            log.error("%s cannot be trusted after two failed loads: restart it", self._worker)
        else:
            log.error("%s could not be trusted after two failed loads: ended its process %d", self._worker, pid)

    async def _on_loss(self, error: EngineUnavailable) -> None:
        """The engine does not answer: nobody may route to it until it is looked at again."""
        if self._alive:
            log.warning("%s is gone, waiting for it: %s", self._worker, error)
            await self._status.say("stopped")
        elif self._status.is_due:
            await self._status.say("starting", f"{self._control.url} does not answer: the engine loads, or is gone")
        self._alive = False
        if self._leaves and self._machine.incarnation is None and self._on_drain is not None:
            self._on_drain()  # it never answered, so it has no calls

    async def _hear(self, follower: Follower, timeout_s: float) -> None:
        """Until something was written, or the time is over."""
        try:
            rows = await asyncio.to_thread(follower.poll, timeout_s)
        except UnreachableError as error:
            log.warning("%s: the log does not answer: %s", self._worker, error)
            await asyncio.sleep(timeout_s)
            return
        for row in rows:
            self._learn(row)

    def _learn(self, row: Row[Any]) -> None:
        """A weight event: none names files outside a version's directory. Or a status, which may ask this engine to
        stop, or to go on."""
        if row.kind == WORKERS:
            request: WorkerStatus = row.record
            if request["role"] == DRAIN and (request["worker"], request["policy"]) == (
                self._worker,
                self._machine.policy,
            ):
                change = self._drains.add if request["draining"] else self._drains.discard
                change(request["incarnation"])
            return
        event: WeightVersion = row.record
        fault = fault_of(event, self._machine.policy)
        if fault is None:
            self._machine.learn(event if self._root is None else locate(event, self._root))
        else:
            passed_over(row.raw, fault)
