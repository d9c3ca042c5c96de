"""The engines behind the gateway: which may serve which call.

Invariants: for a granted session an engine serves only if its newest status says that this incarnation acknowledged a
version of the session's policy that is new enough, and has not expired; a start of the engine that was not acknowledged
yet serves no granted session. A call that names a version goes to an engine that acknowledged exactly that one. Other
traffic also goes to an engine that nobody vouches for (serving fails open): its tokens carry the engine's own labels
and train only as far as those are known. An engine that was told to stop gets no call any more, and keeps those that it
has; one that hangs keeps them while no other could take them over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.infra.engines.base import Engine
from millrace.infra.errors import ConfigError, EngineUnavailable
from millrace.infra.workers import DRAIN, ENGINE, FORGOTTEN_US
from millrace.producers.gateway.calls.models import no_version
from millrace.producers.gateway.calls.routing import EngineView, PrefixMemory, RouteWish, SpeedMeter, rank
from millrace.schemas.ids import now_micros
from millrace.schemas.records import WorkerStatus

logger = logging.getLogger(__name__)

Make = Callable[..., Engine]
GONE_STATES = ("failed", "stopped", "starting")
HANGS = "it hangs"
"""the trouble of an engine that answers nobody"""
LOOK_S = 1.0
"""between two looks at engines with calls that wait"""
SILENCE_S = 5.0
"""for which a call may hear nothing of an engine before somebody looks whether that hangs"""


@dataclass(slots=True, eq=False)
class UnderWay:
    """A call that an engine has. `may_move`: whether another could take it over now; `waits_since`: since when it waits
    for the engine's next word, in the event loop's seconds, None while it does not."""

    wish: RouteWish
    may_move: Callable[[], bool] = lambda: True
    waits_since: float | None = None
    _task: asyncio.Task[Any] | None = None
    _cancels: int = 0
    """that the task knew of before it waited"""
    _is_broken_off: bool = False

    def wait(self, now: float) -> None:
        """The task that runs is about to wait for the engine."""
        self._task = task = asyncio.current_task()
        assert task is not None
        self._cancels = task.cancelling()
        self.waits_since = now

    def break_off(self) -> None:
        """It waits no longer: a CancelledError in its place, of which `was_broken_off` says that it is this one."""
        if self._task is not None and self.waits_since is not None and not self._is_broken_off:
            self._is_broken_off = self._task.cancel()

    def was_broken_off(self) -> bool:
        """Whether a CancelledError, which is settled by this, came of `break_off` and of nobody else."""
        return self._is_broken_off and self._task is not None and self._task.uncancel() <= self._cancels


@dataclass(slots=True, eq=False)
class EngineTarget:
    """One engine. `version` is the newest that `incarnation` acknowledged, None before."""

    url: str
    engine: Engine
    static: bool = False
    worker: str = ""
    incarnation: str = ""
    version: int | None = None
    expires_at: int = 0
    seen_at: int = 0
    load: tuple[str, int | None] | None = None
    """the start of it, and the version, that it was last said to serve"""
    is_gone: bool = False
    """whether the newest status says so"""
    is_draining: bool = False
    """whether it takes no new calls"""
    other_calls: int = 0
    """calls of others than this gateway that it had at its newest status"""
    token_s: float | None = None
    """seconds that a call took for each token, as it said"""
    load_calls: int = 0
    """calls that it ran at its newest status"""
    most: int = 0
    """calls of this gateway that it had at once since its newest status"""
    trouble: str = ""
    """why it is taken for dead whatever its status says; empty where it is not"""
    calls: set[UnderWay] = field(default_factory=set)
    speed: SpeedMeter = field(default_factory=SpeedMeter)
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)

    @property
    def running(self) -> int:
        """How many calls of this gateway it has."""
        return len(self.calls)

    def may_serve(self, min_version: int) -> bool:
        """Whether it may serve a session that needs this version."""
        return self.version is not None and self.version >= min_version and now_micros() < self.expires_at

    @property
    def is_away(self) -> bool:
        """Whether it is said to be gone, or what was said of it has expired; False before anything was said."""
        return bool(self.incarnation) and (self.is_gone or now_micros() >= self.expires_at)

    def view(self, chain: Sequence[int], now: float) -> EngineView:
        """As the router sees it at `now`, monotonic seconds, before a prompt of this chain."""
        return EngineView(
            self.url,
            self.version if self.may_serve(0) else None,
            self.running + self.other_calls,
            self.speed.token_s(now) or self.token_s,
            self.prefixes.match(chain),
            is_announced=bool(self.incarnation),
            is_draining=self.is_draining,
            is_dead=self.is_away or bool(self.trouble),
        )


def _is_open(target: EngineTarget) -> bool:
    return target.may_serve(0) and not target.is_draining


class Fleet:
    """Made and used in one event loop. `make` opens the engine of a url, and of a `kind` where one is announced; it
    raises ConfigError for a url or a kind that there is not."""

    def __init__(self, policy: str, make: Make, urls: tuple[str, ...] = (), *, silence_s: float = SILENCE_S) -> None:
        self.policy = policy
        self._make = make
        self._silence_s = silence_s
        self.targets = {url: EngineTarget(url, make(url), static=True) for url in urls}
        self._drains: set[tuple[str, str]] = set()
        """starts of workers that were told to stop"""
        self._strangers: set[str] = set()
        """urls of engines that this release cannot speak with"""
        self._change = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Future[None]] = set()

    def observe(self, status: WorkerStatus) -> None:
        """A WorkerStatus of the workers topic."""
        url = (status["url"] or "").rstrip("/")
        if status["role"] not in (ENGINE, DRAIN) or not url or status["policy"] not in (None, self.policy):
            return
        target = self.targets.get(url)
        if status["role"] == DRAIN:
            start = status["worker"], status["incarnation"]
            if status["draining"]:
                self._drains.add(start)
            else:
                self._drains.discard(start)
            if target is not None and (target.worker, target.incarnation) == start:
                target.is_draining = status["draining"]  # where its reloader says otherwise still, it says so again
            return
        if target is None:
            if status["state"] in GONE_STATES or (engine := self._open(url, status.get("kind"))) is None:
                return
            self._forget()
            target = self.targets[url] = EngineTarget(url, engine)
        if status["time"] < target.seen_at:
            return
        if status["incarnation"] != target.incarnation or status["version"] is None or status["state"] in GONE_STATES:
            target.version = None
        target.seen_at, target.is_gone = status["time"], status["state"] in GONE_STATES
        target.worker, target.incarnation = status["worker"], status["incarnation"]
        target.expires_at = status["expires_at"]
        target.is_draining = status.get("draining") or (target.worker, target.incarnation) in self._drains
        target.other_calls = max(0, (status.get("running") or 0) + (status.get("waiting") or 0) - target.most)
        target.most = target.running
        former, tokens_s = target.load_calls, status.get("tokens_s")
        target.load_calls = running = status.get("running") or 0
        # Over a time in which it had nothing to do at first, its rate says nothing. The router passes over nonsense.
        target.token_s = (former + running) / 2 / tokens_s if former and running and tokens_s else None
        if status["state"] in ("loaded", "serving"):
            target.version = status["version"]
            target.engine.adapter = status.get("adapter")
            if target.load != (load := (status["incarnation"], status["version"])):
                # Its cache was reset, and its label set, by somebody whom it answered.
                target.load, target.trouble = load, ""
                target.prefixes.clear()
        change, self._change = self._change, asyncio.Event()
        change.set()

    def _open(self, url: str, kind: str | None) -> Engine | None:
        """The engine of a url that was announced; None where this release cannot speak with it."""
        try:
            return self._make(url) if kind is None else self._make(url, kind=kind)
        except ConfigError as error:
            if url not in self._strangers:  # it announces itself every other second
                self._strangers.add(url)
                logger.warning("%s is announced, and gets no call: %s", url, error)
            return None

    def _forget(self) -> None:
        """Those of whom nothing was heard for so long that their machines are others' by now."""
        limit = now_micros() - FORGOTTEN_US
        for url, target in list(self.targets.items()):
            if not target.static and target.is_away and target.seen_at < limit and not target.calls:
                del self.targets[url]
                closing = asyncio.ensure_future(target.engine.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    def doubt(self, target: EngineTarget, trouble: str = "") -> None:
        """It broke off or mislabelled its tokens: nothing said of it before counts any more. `trouble`: what more is
        wrong with it, until it is another start or at another version."""
        target.version, target.seen_at = None, now_micros()
        target.trouble = trouble or target.trouble

    @property
    def is_away(self) -> bool:
        """Whether no engine is known that could serve any call."""
        return all(target.is_away for target in self.targets.values())

    @property
    def versions(self) -> set[int]:
        """Those that engines serve, as far as they said so."""
        return {t.version for t in self.targets.values() if t.version is not None and _is_open(t)}

    def best(self, wish: RouteWish) -> EngineTarget | None:
        """The engine that should answer a call now."""
        now = asyncio.get_running_loop().time()
        views = rank([target.view(wish.chain, now) for target in self.targets.values()], wish)
        return self.targets[views[0].name] if views else None

    async def route(self, wish: RouteWish, patience_s: float) -> EngineTarget:
        """The engine for a call. Waits for one to be ready.

        Raises EngineUnavailable after `patience_s`, and ApiError 404 as soon as engines serve, all of them others than
        the version that is named."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while True:
            target = self.best(wish)
            if target is not None:
                return target
            if wish.version is not None and (versions := self.versions):
                raise no_version(self.policy, wish.version, versions)
            rest_s = deadline - asyncio.get_running_loop().time()
            if rest_s <= 0:
                raise EngineUnavailable(self._excuse(wish))
            change = self._change
            # Statuses also lapse and come back without a change, so look again each second.
            try:
                await asyncio.wait_for(change.wait(), min(rest_s, 1.0))
            except TimeoutError:
                continue

    def _excuse(self, wish: RouteWish) -> str:
        if not self.targets:
            return "no engine is known: start one, or set [gateway] engine_url"
        if all(target.is_draining for target in self.targets.values()):
            return "every engine was told to take no new calls: start one"
        version = wish.minimum if wish.version is None else wish.version
        standings = ", ".join(
            f"{t.url} at {'nothing' if t.version is None else t.version}" for t in self.targets.values()
        )
        logger.warning("no engine at version %d or newer: %s", version, standings)
        return f"no engine acknowledged version {version} or newer in time: is the reloader running?"

    # ------------------------------------------------------------------ calls under way

    def begin(self, target: EngineTarget, call: UnderWay) -> None:
        """An engine has a call from now on."""
        target.calls.add(call)
        target.most = max(target.most, target.running)
        target.prefixes.add(call.wish.chain)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look_on())

    def end(self, target: EngineTarget, call: UnderWay, seconds: float, tokens: int) -> None:
        """An engine has a call no more; it took so long, and sampled so much."""
        target.calls.discard(call)
        target.speed.add(seconds, tokens, asyncio.get_running_loop().time())

    async def _look_on(self) -> None:
        """Look for engines that hang, for as long as there are calls or an engine is known to hang."""
        while targets := [one for one in self.targets.values() if one.calls or one.trouble == HANGS]:
            await asyncio.sleep(LOOK_S)
            await asyncio.gather(*map(self._look_at, targets))

    async def _look_at(self, target: EngineTarget) -> None:
        limit = asyncio.get_running_loop().time() - self._silence_s
        silent_calls = [one for one in target.calls if one.waits_since is not None and one.waits_since <= limit]
        if not silent_calls and target.trouble != HANGS:
            return
        hangs = not await target.engine.health()
        if hangs != (target.trouble == HANGS) and target.trouble in ("", HANGS):
            target.trouble = HANGS if hangs else ""
            logger.warning("%s %s", target.url, "does not answer any more" if hangs else "answers again")
        # A status that lapsed says nothing of an engine that answers: its reloader may be the one that is gone.
        if hangs or target.is_gone:
            await self._move(target, silent_calls)

    async def _move(self, target: EngineTarget, calls: Collection[UnderWay]) -> None:
        """Break off the calls of an engine that hangs which another could take over."""
        answers: dict[str, bool] = {}
        for call in calls:
            wish = call.wish._replace(failures=(*call.wish.failures, target.url))
            successor = self.best(wish)
            if not call.may_move() or successor is None or successor.is_away or successor.trouble:
                continue
            if not successor.may_serve(0) and successor.url not in answers:  # nobody vouches for it
                answers[successor.url] = await successor.engine.health()
            if answers.get(successor.url, True) and call in target.calls:
                call.break_off()

    async def close(self) -> None:
        """Close every engine."""
        if self._watch is not None:
            self._watch.cancel()
        for target in self.targets.values():
            await target.engine.close()
