"""Several processes of one gateway against one, and what a call costs that came to the wrong one: for
`benchmarks.bench_gateway --processes N`.

One gateway and one of N processes stand before the same engine, and take the same load in turns. Each client speaks in
a named conversation over a connection of its own, so that of N processes all but one in N calls are handed on. What a
hop adds is measured apart, at two processes with a port each, one call in flight."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from statistics import median

import aiohttp
import orjson
import psutil

from millrace.producers.gateway.processes.owner import choose_process

Measure = Callable[[Callable[[int], Awaitable[None]], int, float], Awaitable[tuple[float, float, float]]]
ROUNDS = 3
AT_ONCE = 64


async def compare(
    measure: Measure,
    one: str,
    several: str,
    doors: Sequence[str],
    pids: tuple[Sequence[int], Sequence[int]],
    seconds: float,
    tokens: int,
) -> None:
    """Measure and print. `pids`: the one gateway's, and those of the processes of the other."""
    processes = [[psutil.Process(pid) for pid in group] for group in pids]
    text = "What is the weather in Zürich today? " * 8
    numbers = count()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        def at(url: str, stream: bool, name: str = "") -> Callable[[int], Awaitable[None]]:
            async def shot(number: int) -> None:
                messages = [{"role": "user", "content": f"{next(numbers)} {text}"}]
                body = orjson.dumps({"model": "m", "messages": messages, "max_tokens": tokens, "stream": stream})
                headers = {"content-type": "application/json", "x-millrace-session": name or f"client-{number}"}
                async with http.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    async for _ in answer.content.iter_any():
                        pass

            return shot

        size = len(processes[1])
        print(f"\n{size} processes behind one port against one, {AT_ONCE} clients, median of {ROUNDS} rounds in turns")
        print(f"{'':12} | {'one req/s':>9} | {'several req/s':>13} | {'ratio':>5} | {'CPU ms':>6} | {'several':>7}")
        for stream in (False, True):
            rates: tuple[list[float], list[float]] = ([], [])
            cpu: tuple[list[float], list[float]] = ([], [])
            for url in (one, several):
                await measure(at(url, stream), AT_ONCE, seconds / 4)
            for _ in range(ROUNDS):
                for which, url in enumerate((one, several)):
                    spent, before = _cpu(processes[which]), next(numbers)
                    rates[which].append((await measure(at(url, stream), AT_ONCE, seconds))[2])
                    cpu[which].append((_cpu(processes[which]) - spent) / (next(numbers) - before) * 1e3)
            alone, together = median(rates[0]), median(rates[1])
            print(f"{_name(stream):12} | {alone:>9.0f} | {together:>13.0f} | {together / alone:>5.2f} | "
                  f"{median(cpu[0]):>6.2f} | {median(cpu[1]):>7.2f}")  # fmt: skip

        print("\na hop, one call in flight: at the process that holds the conversation, and at the other")
        print(f"{'':12} | {'here p50':>8} | {'there p50':>9} | {'added ms':>8}")
        name = next(f"hop-{at}" for at in range(100) if choose_process(f"name hop-{at}", 2) == 0)
        for stream in (False, True):
            times: tuple[list[float], list[float]] = ([], [])
            for round in range(ROUNDS + 1):
                for which, url in enumerate(doors):
                    p50, _, _ = await measure(at(url, stream, name), 1, seconds / 4 if round == 0 else seconds)
                    if round:
                        times[which].append(p50)
            here, there = median(times[0]), median(times[1])
            print(f"{_name(stream):12} | {here:>8.2f} | {there:>9.2f} | {there - here:>8.2f}")


def _name(stream: bool) -> str:
    return "streamed" if stream else "plain"


def _cpu(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
