"""Which engines may answer a call, best first: a pure ranking of views of them.

    its session's last engine -> one that has read most of the prompt -> the least expected wait

Invariants: an engine that was told to stop, or that failed this call, answers it never; where a version is asked for,
or a grant bounds it, only an engine that acknowledged one that fits does; an engine that is dead comes only where no
other could answer; an engine has no call for its cache's sake beyond its share of all calls, which is as its measured
speed, so that a slow one gets proportionally less; the same views and wish give the same order.

The bound is that of consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018); the wait is that of
Finagle's Peak EWMA balancer: calls under way, times the time of each."""

from __future__ import annotations

import math
import statistics
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

BLOCK = 64
"""tokens whose digest is one link of a prompt's chain"""
MOST_LINKS = 128
"""links of a prompt: what is longer differs behind the part that conversations share"""
MOST_BLOCKS = 1 << 14
"""blocks that are remembered of an engine: a million tokens"""
SHARE = 0.5
"""of the prompt's links, that an engine must have read before this counts"""
OVER = 1.5
"""times its share of all calls that an engine may have for its cache's sake"""
FEW = 4
"""calls that are never too many for an engine"""
LEAST_S, MOST_S = 1e-7, 1e4
"""seconds a token that an engine may take"""
FORGETS = 0.9
"""what remains of earlier calls in a measure at each new one"""
FRESH_S = 30.0
"""how long a measure holds"""


class RouteWish(NamedTuple):
    """What a call asks of its engine. `has_grant`: a grant bounds its versions, by `minimum`; `version`: the one that
    alone may answer; `former`: the engine of its session's last call; `chain`: of its prompt, see `chain_of`; `salt`:
    decides between equals; `failures`: engines that failed it."""

    has_grant: bool = False
    minimum: int = 0
    version: int | None = None
    former: str | None = None
    chain: Sequence[int] = ()
    salt: str = ""
    failures: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine as it stands. `version`: the one that it acknowledged, None where none is known to hold; `calls`: under
    way in it, as far as is known; `token_s`: seconds that a call takes for each token now, None where nobody measured;
    `match`: leading links of the prompt's chain that it has read; `is_announced`: its reloader has spoken of it."""

    name: str
    version: int | None
    calls: int = 0
    token_s: float | None = None
    match: int = 0
    is_announced: bool = False
    is_draining: bool = False
    is_dead: bool = False


def rank(engines: Iterable[EngineView], wish: RouteWish) -> list[EngineView]:
    """Those that may answer, best first; none where nobody may now."""
    fit = _fit(engines, wish)
    if len(fit) < 2:
        return fit
    speeds = {engine.name: 1 / time for engine, time in zip(fit, _times(fit), strict=True)}
    total = 1 + sum(engine.calls for engine in fit)
    all_speeds = sum(speeds.values())

    def order(engine: EngineView) -> tuple[int, int, float, int]:
        speed = speeds[engine.name]
        most = max(FEW, math.ceil(OVER * total * speed / all_speeds))
        place, match = 2, 0
        if engine.calls < most:
            if engine.name == wish.former:
                place = 0
            elif engine.match and engine.match >= SHARE * len(wish.chain):
                place, match = 1, engine.match
        return place, -match, (engine.calls + 1) / speed, crc32(f"{wish.salt} {engine.name}".encode())

    return sorted(fit, key=order)


def _fit(engines: Iterable[EngineView], wish: RouteWish) -> list[EngineView]:
    candidates = [engine for engine in engines if not engine.is_draining and engine.name not in wish.failures]
    fit = [
        engine
        for engine in candidates
        if engine.version is not None and engine.version >= wish.minimum and wish.version in (None, engine.version)
    ]
    if not fit and not wish.has_grant and wish.version is None:
        # One that loads weights now is up; of one that was never announced nobody knows whether it ever was.
        fit = [engine for engine in candidates if engine.is_announced and not engine.is_dead] or candidates
    return [engine for engine in fit if not engine.is_dead] or fit


def _times(fit: Sequence[EngineView]) -> list[float]:
    """Seconds a token of each; that of the median for one that nobody measured, or of which nonsense was said."""
    times = [time if (time := engine.token_s) and LEAST_S <= time <= MOST_S else None for engine in fit]
    measures = [time for time in times if time is not None]
    median = statistics.median(measures) if measures else 1.0
    return [median if time is None else time for time in times]


def chain_of(prompt: Sequence[int]) -> list[int]:
    """Digests of the whole blocks that a prompt begins with, each also of all before it. Of this process alone."""
    block_bytes = array("i", prompt[: BLOCK * MOST_LINKS]).tobytes()
    size = BLOCK * array("i").itemsize
    links, link = [], 0
    for start in range(0, len(block_bytes) - size + 1, size):
        link = hash((link, block_bytes[start : start + size]))
        links.append(link)
    return links


class PrefixMemory:
    """The blocks that an engine has read of late, the ends of prompts forgotten before their beginnings."""

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._links: OrderedDict[int, None] = OrderedDict()
        self._most = most

    def match(self, chain: Sequence[int]) -> int:
        """How many leading links of a chain it holds."""
        return next((at for at in range(len(chain), 0, -1) if chain[at - 1] in self._links), 0)

    def add(self, chain: Sequence[int]) -> None:
        """It reads a prompt of this chain."""
        for link in reversed(chain):
            self._links[link] = None
            self._links.move_to_end(link)
        while len(self._links) > self._most:
            self._links.popitem(last=False)

    def clear(self) -> None:
        """Its cache was reset."""
        self._links.clear()


@dataclass(slots=True)
class SpeedMeter:
    """How long calls take for each of their tokens, the newest counting most. Times are monotonic seconds."""

    _seconds: float = 0.0
    _tokens: float = 0.0
    _at: float = field(default=-math.inf)

    def add(self, seconds: float, tokens: int, now: float) -> None:
        """A call came to its end."""
        if tokens:
            self._seconds = FORGETS * self._seconds + seconds
            self._tokens = FORGETS * self._tokens + tokens
            self._at = now

    def token_s(self, now: float) -> float | None:
        """Seconds a token; None where no call ended of late."""
        return self._seconds / self._tokens if now - self._at < FRESH_S and self._seconds else None
