"""The engines behind the gateway: which may serve which call.

Invariants: for a granted session an engine serves only if its newest status says that this incarnation acknowledged a
version of the session's policy that is new enough, and has not expired; a start of the engine that was not acknowledged
yet serves no granted session. A call that names a version goes to an engine that acknowledged exactly that one. Other
traffic also goes to an engine that nobody vouches for (serving fails open): its tokens carry the engine's own labels
and train only as far as those are known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from millrace.infra.engines.base import Engine
from millrace.infra.errors import EngineUnavailable
from millrace.producers.gateway.calls.models import no_version
from millrace.schemas.ids import now_micros
from millrace.schemas.records import WorkerStatus

logger = logging.getLogger(__name__)

Make = Callable[[str], Engine]
GONE_STATES = ("failed", "stopped", "starting")


@dataclass(slots=True, eq=False)
class EngineTarget:
    """One engine. `version` is the newest that `incarnation` acknowledged, None before."""

    url: str
    engine: Engine
    static: bool = False
    incarnation: str = ""
    version: int | None = None
    expires_at: int = 0
    running: int = 0
    seen_at: int = 0
    is_gone: bool = False
    """whether the newest status says so"""

    def may_serve(self, min_version: int) -> bool:
        """Whether it may serve a session that needs this version."""
        return self.version is not None and self.version >= min_version and now_micros() < self.expires_at

    @property
    def is_away(self) -> bool:
        """Whether it is said to be gone, or what was said of it has expired; False before anything was said."""
        return bool(self.incarnation) and (self.is_gone or now_micros() >= self.expires_at)


class Fleet:
    """Made and used in one event loop. `make` opens the engine of a url."""

    def __init__(self, policy: str, make: Make, urls: tuple[str, ...] = ()) -> None:
        self.policy = policy
        self._make = make
        self.targets = {url: EngineTarget(url, make(url), static=True) for url in urls}
        self._changed = asyncio.Event()

    def observe(self, status: WorkerStatus) -> None:
        """A WorkerStatus of the workers topic."""
        url = (status["url"] or "").rstrip("/")
        if status["role"] != "engine" or not url or status["policy"] not in (None, self.policy):
            return
        target = self.targets.get(url)
        if target is None:
            if status["state"] in GONE_STATES:
                return
            target = self.targets[url] = EngineTarget(url, self._make(url))
        if status["time"] < target.seen_at:
            return
        if status["incarnation"] != target.incarnation or status["version"] is None or status["state"] in GONE_STATES:
            target.version = None
        target.seen_at, target.is_gone = status["time"], status["state"] in GONE_STATES
        target.incarnation, target.expires_at = status["incarnation"], status["expires_at"]
        if status["state"] in ("loaded", "serving"):
            target.version = status["version"]
            target.engine.adapter = status.get("adapter")
        change, self._changed = self._changed, asyncio.Event()
        change.set()

    def doubt(self, target: EngineTarget) -> None:
        """It broke off or mislabelled its tokens: nothing said of it before counts any more."""
        target.version, target.seen_at = None, now_micros()

    @property
    def is_away(self) -> bool:
        """Whether no engine is known that could serve any call."""
        return all(target.is_away for target in self.targets.values())

    @property
    def versions(self) -> set[int]:
        """Those that engines serve, as far as they said so."""
        return {t.version for t in self.targets.values() if t.version is not None and t.may_serve(0)}

    async def route(
        self,
        has_grant: bool,
        min_version: int,
        affinity: str | None,
        patience_s: float,
        version: int | None = None,
    ) -> EngineTarget:
        """The engine for a call: the session's former one, else the least loaded; where a `version` is named, one at
        exactly that. Waits for one to be ready.

        Raises EngineUnavailable after `patience_s`, and ApiError 404 as soon as engines serve, all of them others than
        the version that is named."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while True:
            fit = [t for t in self.targets.values() if t.may_serve(min_version) and version in (None, t.version)]
            if not fit and version is not None and (versions := self.versions):
                raise no_version(self.policy, version, versions)
            if not fit and not has_grant and version is None:
                fit = list(self.targets.values())
            if fit:
                former_target = self.targets.get(affinity or "")
                return former_target if former_target in fit else min(fit, key=lambda target: target.running)
            rest_s = deadline - asyncio.get_running_loop().time()
            if rest_s <= 0:
                raise EngineUnavailable(self._excuse(min_version if version is None else version))
            change = self._changed
            # Statuses also lapse and come back without a change, so look again each second.
            try:
                await asyncio.wait_for(change.wait(), min(rest_s, 1.0))
            except TimeoutError:
                continue

    def _excuse(self, min_version: int) -> str:
        if not self.targets:
            return "no engine is known: start one, or set [gateway] engine_url"
        standings = ", ".join(
            f"{t.url} at {'nothing' if t.version is None else t.version}" for t in self.targets.values()
        )
        logger.warning("no engine at version %d or newer: %s", min_version, standings)
        return f"no engine acknowledged version {min_version} or newer in time: is the reloader running?"

    async def close(self) -> None:
        """Close every engine."""
        for target in self.targets.values():
            await target.engine.close()
