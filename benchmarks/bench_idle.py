"""What connections that say nothing cost those that are busy: p99 of calls beside thousands of idle ones, in one run.

    python -m benchmarks.bench_idle [--idle 5000] [--clients 64] [--seconds 8] [--rounds 5]

A fake instant engine, and before it the gateway with capture on; so many clients call in a closed loop. Each round
measures once without idle connections and once beside them, in turn first, so that what else the machine does falls on
both. Half of the idle ones have never sent a byte, half have had one call and keep alive. The limit: the p99 rises by
less than a tenth."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles

import aiohttp
import uvloop

from benchmarks.bench_gateway import engine
from benchmarks.bench_serving import START_S, Candidate, Load, candidates, spawned
from millrace.infra.process.net import free_ports, is_listening, wait_until

LIMIT = 1.1
"""p99 beside idle connections over p99 without"""
AT_ONCE = 200
"""connections that are opened at a time"""
CALL = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@asynccontextmanager
async def idle_connections(port: int, count: int) -> AsyncIterator[None]:
    """So many open connections that say nothing."""
    writers: list[asyncio.StreamWriter] = []

    async def connect(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        if number % 2:
            writer.write(CALL)
            await reader.readuntil(b"\r\n\r\n")

    for first in range(0, count, AT_ONCE):
        await asyncio.gather(*(connect(number) for number in range(first, min(first + AT_ONCE, count))))
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.5)  # whoever counts connections sees that they are gone


async def compare(candidate: Candidate, idle: int, clients: int, seconds: float, rounds: int) -> float:
    """Print the p99 of each round, without and beside idle connections; the median of their ratios."""
    port = int(candidate.url.rpartition(":")[2])
    ratios = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        load = Load(http, candidate, tokens=50)
        await load.open()

        async def p99(count: int) -> float:
            async with idle_connections(port, count):
                await load.loop(stream=False, at_once=clients, seconds=min(1.0, seconds))  # warm
                times = await load.loop(stream=False, at_once=clients, seconds=seconds)
            return quantiles([whole for _, whole in times], n=100)[98]

        for number in range(rounds):
            figures = {count: await p99(count) for count in ((0, idle) if number % 2 else (idle, 0))}
            ratios.append(figures[idle] / figures[0])
            print(f"{candidate.name:14}{figures[0]:>10.1f} ms{figures[idle]:>10.1f} ms{ratios[-1]:>8.2f}", flush=True)
    return median(ratios)


def main() -> None:
    """Start one after the other, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=5000, help="connections that say nothing")
    parser.add_argument("--clients", type=int, default=64, help="clients that call")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement; above 20 idle ones are closed")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements")
    given = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{given.clients} clients, {given.idle} idle connections, {os.cpu_count()} cores; p99 without, beside, ratio")
    with tempfile.TemporaryDirectory() as name:
        (port,) = free_ports(1)
        with spawned(engine, port, 50) as pid:
            for candidate in candidates([], Path(name), Path(name), f"http://127.0.0.1:{port}", pid):
                at = int(candidate.url.rpartition(":")[2])
                wait_until(lambda at=at: is_listening("127.0.0.1", at), candidate.name, START_S)
                if candidate.name != "gateway":
                    continue
                ratio = uvloop.run(compare(candidate, given.idle, given.clients, given.seconds, given.rounds))
                print(
                    f"{candidate.name}: {ratio:.2f} of the p99 without them at the median (limit {LIMIT})", flush=True
                )


if __name__ == "__main__":
    main()
