"""Routing over three engines: `python -m benchmarks.bench_fleet [--seconds 300] [--clients 64]`.

The gateway's own fleet and relay, before engines that are modelled: a step samples a token for each of up to 32 rows
and takes longer the more rows there are, and prompts take time for each token that is not cached. The clock is virtual,
so that seconds cost little and figures repeat exactly. Each line is a ratio:

- `slow`: one engine is slower by five times: tokens a second against the best static split of calls that a search over
  the slow one's share finds, each dealt out as evenly as it goes;
- `prefix`: conversations of 24 agents, nothing known of sessions: prompt tokens found in a cache, and tokens a second,
  against engines drawn at random;
- `drain` and `frozen`: one of three is told to stop, and stops to answer, under load: calls that failed, of all."""

from __future__ import annotations

import argparse
import asyncio
import random
import selectors
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from millrace.infra.engines.base import Chunk, Engine, LabelSpan, Sampling, Usage
from millrace.infra.errors import EngineError
from millrace.infra.workers import status
from millrace.producers.gateway.calls.fleet import EngineTarget, Fleet
from millrace.producers.gateway.calls.relay import Relay
from millrace.producers.gateway.calls.routing import BLOCK, RouteWish, chain_of
from millrace.schemas import codec

T = TypeVar("T")
ROWS = 32
STEP_S = 0.02
PREFILL_S = 0.0002
"""for a token of a prompt"""
CACHE = 1500
"""blocks in the cache of an engine"""
NAMES = ("http://a", "http://b", "http://c")
LIVES_S = 1e6
WARM = 0.2
"""of the time, which is not counted"""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Whose time passes where everybody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits for nobody")
        self._loop.now += max(0.0, timeout)
        return super().select(0)


@dataclass(eq=False)
class Row:
    """A request in an engine. `left`: tokens to sample; `prefill`: tokens to read first."""

    left: int
    prefill: int
    end: asyncio.Future[None]


class ModelledEngine(Engine):
    """Slower than others by `slow` times. `read` and `hit` count tokens of prompts, `begun` requests."""

    kind = "modelled"

    def __init__(self, slow: float = 1.0) -> None:
        self.slow = slow
        self.is_frozen = False
        self.read = self.hit = self.begun = 0
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._rows: list[Row] = []
        self._waiting: list[Row] = []
        self._task: asyncio.Task[None] | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, stream: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        self.begun += 1
        chain = chain_of(prompt_ids)
        hit = next((at for at in range(len(chain), 0, -1) if chain[at - 1] in self._cache), 0) * BLOCK
        for link in reversed(chain):
            self._cache[link] = None
            self._cache.move_to_end(link)
        while len(self._cache) > CACHE:
            self._cache.popitem(last=False)
        self.read, self.hit = self.read + len(prompt_ids), self.hit + hit
        row = Row(sampling.max_tokens, len(prompt_ids) - hit, asyncio.get_running_loop().create_future())
        self._waiting.append(row)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            await row.end
        finally:
            for rows in (self._rows, self._waiting):
                if row in rows:
                    rows.remove(row)
        count = sampling.max_tokens
        spans = (LabelSpan("policy@0", 0, count),)
        yield Chunk(0, [7] * count, [-1.0] * count, "length", None, spans, Usage(len(prompt_ids), count, hit))

    async def _run(self) -> None:
        while self._rows or self._waiting:
            room = ROWS - len(self._rows)
            fresh, self._waiting = self._waiting[:room], self._waiting[room:]
            self._rows += fresh
            seconds = STEP_S * (1 + len(self._rows) / ROWS) + PREFILL_S * sum(row.prefill for row in fresh)
            await asyncio.sleep(seconds * self.slow)
            while self.is_frozen:
                await asyncio.sleep(1.0)
            for row in self._rows:
                row.left -= 1
                if not row.left and not row.end.done():
                    row.end.set_result(None)
            self._rows = [row for row in self._rows if row.left]

    async def health(self) -> bool:
        return not self.is_frozen

    async def weight_version(self) -> str:
        return "policy@0"

    async def close(self) -> None:
        """Nothing to close."""


class DealingFleet(Fleet):
    """Calls go to whom `deal` names, whatever they ask."""

    deal: Callable[[], str]

    def best(self, wish: RouteWish) -> EngineTarget | None:
        return self.targets[self.deal()]


def even_deal(weights: Sequence[float]) -> Callable[[], str]:
    """The engines in turns, as often as their weights say (smooth weighted round robin)."""
    credit = [0.0] * len(weights)

    def deal() -> str:
        for at, weight in enumerate(weights):
            credit[at] += weight
        at = max(range(len(weights)), key=credit.__getitem__)
        credit[at] -= sum(weights)
        return NAMES[at]

    return deal


def chance_deal(seed: int = 1) -> Callable[[], str]:
    """Any of the engines."""
    draw = random.Random(seed)
    return lambda: draw.choice(NAMES)


@dataclass
class Outcome:
    """What became of the calls of a run: `tokens` a second, share of prompt tokens that were `cached`."""

    tokens: float
    cached: float
    calls: int
    failures: int
    late: int = 0
    """calls that began at an engine after it was told to stop"""


def say(fleet: Fleet, name: str, *, draining: bool = False) -> None:
    """As the reloader of an engine would."""
    outgoing = status(
        "t", worker=name, incarnation="1", role="engine", state="serving", policy="policy", lives_s=LIVES_S, version=0,
        url=name, draining=draining,
    )  # fmt: skip
    fleet.observe(codec.decode_as("WorkerStatus", outgoing.value or b""))


async def drive(
    seconds: float,
    clients: int,
    *,
    slow: float = 1.0,
    deal: Callable[[], str] | None = None,
    shares_prompts: bool = False,
    fault: str = "",
) -> Outcome:
    """So many clients that ask again and again. `fault`: drain or frozen, of the first engine in the middle."""
    engines = dict(zip(NAMES, (ModelledEngine(), ModelledEngine(), ModelledEngine(slow)), strict=True))
    fleet = (Fleet if deal is None else DealingFleet)("policy", engines.__getitem__, NAMES)
    if isinstance(fleet, DealingFleet) and deal is not None:
        fleet.deal = deal
    for name in NAMES:
        say(fleet, name)
    loop, outcome, draw = asyncio.get_running_loop(), Outcome(0, 0, 0, 0), random.Random(0)
    prompts = [[agent] * 1024 for agent in range(24)]

    async def ask(prompt: list[int]) -> int:
        length = draw.randrange(20, 200)
        wish = RouteWish(chain=chain_of(prompt), salt=str(draw.random()))
        target = await fleet.route(wish, 60)
        relay = Relay(fleet, target, wish, prompt, Sampling(length), "call", lambda _: None)
        outcome.calls += 1
        try:
            count = sum([len(chunk.token_ids) async for chunk in relay.chunks(stream=False)])
        except EngineError:
            outcome.failures += 1
            return 0
        if loop.time() > WARM * seconds:
            outcome.tokens += count / (seconds * (1 - WARM))
        return count

    async def client() -> None:
        while True:
            prompt = list(draw.choice(prompts)) if shares_prompts else [draw.randrange(1 << 20) for _ in range(64)]
            for _ in range(6 if shares_prompts else 1):
                await ask(prompt)
                prompt = [*prompt, *(draw.randrange(1 << 20) for _ in range(256))]

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    await asyncio.sleep(seconds / 2)
    first = engines[NAMES[0]]
    before = first.begun
    if fault == "drain":
        say(fleet, NAMES[0], draining=True)
    first.is_frozen = fault == "frozen"
    await asyncio.sleep(seconds / 2)
    outcome.late = first.begun - before
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in results), results
    outcome.cached = sum(one.hit for one in engines.values()) / sum(one.read for one in engines.values())
    await fleet.close()
    return outcome


def run(work: Coroutine[Any, Any, T]) -> T:
    """In a virtual time of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def main() -> None:
    """Prints one line a question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=64)
    chosen = parser.parse_args()
    seconds, clients = chosen.seconds, chosen.clients
    routed = run(drive(seconds, clients, slow=5))
    splits = {
        share: run(drive(seconds, clients, slow=5, deal=even_deal(((1 - share) / 2, (1 - share) / 2, share)))).tokens
        for share in (0.0, 0.03, 0.06, 0.09, 0.12, 0.16, 0.2, 1 / 3)
    }
    best = max(splits, key=splits.__getitem__)
    print(
        f"slow    {routed.tokens / splits[best]:.2f} of the best static split (that gives the slow one a share of "
        f"{best:.2f}), {routed.tokens / splits[1 / 3]:.2f} of an even one"
    )
    routed, by_chance = (run(drive(seconds, clients, deal=deal, shares_prompts=True)) for deal in (None, chance_deal()))
    print(
        f"prefix  {routed.cached:.0%} of prompt tokens cached against {by_chance.cached:.0%} at random "
        f"({routed.cached / by_chance.cached:.2f}), {routed.tokens / by_chance.tokens:.2f} of its tokens a second"
    )
    for fault in ("drain", "frozen"):
        outcome = run(drive(seconds, clients, fault=fault))
        print(f"{fault:7} {outcome.failures} of {outcome.calls} calls failed, {outcome.late} began there behind it")


if __name__ == "__main__":
    main()
