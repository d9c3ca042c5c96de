"""How the bytes of a version come to an engine: one seam, two siblings.

Invariants that every sibling keeps: `prepare` checks what can be checked and touches no engine; `Delivery.load` makes a
frozen engine hold exactly the bytes that the event's hashes name, or raises; both may be repeated; nothing of a
transfer that was cut short hinders the next."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.consumers.reloader.compose import MOST_FOLDERS, clear, fetch
from millrace.consumers.reloader.directory import Signature
from millrace.infra.engines.control import EngineControl
from millrace.infra.errors import ReloadError
from millrace.schemas.records import WeightVersion

Events = Mapping[int, WeightVersion]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A version that may be loaded. signature: of its tensors; load: put it into the frozen engine."""

    signature: Signature
    load: Callable[[], Awaitable[None]]


class WeightTransport(ABC):
    """Brings versions to one engine."""

    @abstractmethod
    async def prepare(
        self, control: EngineControl, event: WeightVersion, events: Events, reference: Signature | None
    ) -> Delivery:
        """Check that `event`, one of `events`, can be had and fits the engine, whose former tensors had the signature
        `reference` (None: not known). Raises ReloadError with the reason when not."""

    async def on_load(self, version: int) -> None:
        """The engine serves `version` now: what only former ones needed may go."""
        return None


class SharedDirectory(WeightTransport):
    """Through a disk that the engine sees: the version's own directory, or one composed of deltas in `cache`."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache

    async def prepare(
        self, control: EngineControl, event: WeightVersion, events: Events, reference: Signature | None
    ) -> Delivery:
        folder, signature = await asyncio.to_thread(fetch, event, events, self._cache, reference)
        if reason := await control.refusal(folder):
            raise ReloadError(reason)

        async def load() -> None:
            await control.load(folder)

        return Delivery(signature, load)

    async def on_load(self, version: int) -> None:
        if self._cache is not None:
            await asyncio.to_thread(clear, self._cache, keep=MOST_FOLDERS)
