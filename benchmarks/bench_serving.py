"""What stands between a client and a model: the gateway beside its peers, before one fake instant engine, in one run.

    python -m benchmarks.bench_serving [--times 3] [--seconds 4] [--peer litellm] [--peer portkey] [--cache DIR]
        [--pause-ms 10] [--streams 64]

Everything shares the machine: the fake engine, whatever stands before it, and this load generator (closed loop,
keep-alive). One candidate runs at a time. `direct` is the engine alone, `pass-through` hands every byte on and nothing
else, `gateway` captures each call with its exact tokens to a log on disk; the peers are installed into DIR by `uv` and
`npm`, each in an environment of its own, and store nothing. Plain and streamed, of `direct` its own figures, and of
each other what it adds:

    added p50, p99    ms that a call takes longer than the direct one, one in flight
    first byte        ms to the first token that it adds, streamed, one in flight
    of many           ms to the first token that it adds, streamed, so many streams in flight
    calls/s           as many in flight
    CPU               ms of the candidate's processes a call, as many in flight
    resident          MiB of its processes at the end

The rows `one by one` are streams of an engine that gives one token at a time, `--pause-ms` apart, as engines do.

The forwarder of the gateway sends to a bus that forgets, so that what is resident is the gateway's own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import aiohttp
import orjson
import psutil
import uvloop

from benchmarks.bench_gateway import engine, gateway, passthrough
from millrace.infra.process.net import free_ports, is_listening, wait_until

WARM = 100
START_S = 180.0
PATH = "/v1/chat/completions"
UV = Path(sys.prefix).parent / ".venv-tools" / "bin" / "uv"
PROMPT = "What is the weather in Zürich today? " * 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """What answers at `url`. `headers` are those that it asks of a client; `pids` its processes, `fresh` whether calls
    need a key from `POST /v1/sessions` first."""

    name: str
    url: str
    pids: tuple[int, ...]
    headers: Mapping[str, str]
    fresh: bool = False

    @property
    def processes(self) -> list[psutil.Process]:
        """With all that they started."""
        found = [psutil.Process(pid) for pid in self.pids]
        return [*found, *(child for process in found for child in process.children(recursive=True))]

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        times = [process.cpu_times() for process in self.processes]
        return sum(time.user + time.system for time in times)

    def resident(self) -> float:
        """MiB, as they share nothing."""
        return sum(process.memory_info().rss for process in self.processes) / 2**20


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one way of calling; milliseconds, calls a second."""

    p50: float
    p99: float
    first: float
    of_many: float
    rate: float
    cpu: float


class Unserved(Exception):
    """The candidate refuses a call."""


class Load:
    """Calls to one candidate."""

    def __init__(self, http: aiohttp.ClientSession, candidate: Candidate, tokens: int) -> None:
        self._http = http
        self._candidate = candidate
        self._tokens = tokens
        self._count = 0
        self._headers = {"content-type": "application/json", **candidate.headers}

    async def open(self) -> None:
        """Get a key, where the candidate gives them."""
        if self._candidate.fresh:
            async with self._http.post(f"{self._candidate.url}/v1/sessions", json={}) as answer:
                self._headers["authorization"] = f"Bearer {(await answer.json())['api_key']}"

    async def call(self, stream: bool) -> tuple[float, float]:
        """Milliseconds to the first token and to the end."""
        self._count += 1
        messages = [{"role": "user", "content": f"{self._count} {PROMPT}"}]
        body = orjson.dumps({"model": "m", "messages": messages, "max_tokens": self._tokens, "stream": stream})
        began, first = time.perf_counter(), 0.0
        async with self._http.post(self._candidate.url + PATH, data=body, headers=self._headers) as answer:
            if answer.status != 200:
                raise Unserved(f"{self._candidate.name} answered {answer.status}: {(await answer.text())[:300]}")
            async for data in answer.content.iter_any():
                if not first and b"content" in data:
                    first = time.perf_counter()
        end = time.perf_counter()
        return ((first or end) - began) * 1e3, (end - began) * 1e3

    async def measure(self, stream: bool, seconds: float, many: int) -> Figures:
        """One at a time, then many at once."""
        for _ in range(WARM // many + 1):
            await asyncio.gather(*(self.call(stream) for _ in range(many)))
        alone = await self.loop(stream, 1, seconds)
        cpu, began, count = self._candidate.cpu(), time.perf_counter(), self._count
        crowd = await self.loop(stream, many, seconds)
        done = self._count - count
        cuts = quantiles([whole for _, whole in alone], n=100)
        return Figures(
            cuts[49],
            cuts[98],
            median(first for first, _ in alone),
            median(first for first, _ in crowd),
            done / (time.perf_counter() - began),
            (self._candidate.cpu() - cpu) / done * 1e3,
        )

    async def loop(self, stream: bool, at_once: int, seconds: float) -> list[tuple[float, float]]:
        """Milliseconds to the first token and to the end, of the calls of so many clients."""
        taken: list[tuple[float, float]] = []
        end = time.perf_counter() + seconds

        async def one() -> None:
            while time.perf_counter() < end or len(taken) < 2:  # of one there are no percentiles
                taken.append(await self.call(stream))

        await asyncio.gather(*(one() for _ in range(at_once)))
        return taken


async def measured(
    candidate: Candidate, seconds: float, tokens: int, ways: Sequence[bool], many: int
) -> dict[bool, Figures]:
    """Each of the ways, by whether it streams; without a way of which it serves no call."""
    found: dict[bool, Figures] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        load = Load(http, candidate, tokens)
        await load.open()
        for stream in ways:
            try:
                found[stream] = await load.measure(stream, seconds, many)
            except Unserved as error:
                print(error)
    return found


HEAD = (
    f"{'':24}{'added p50':>10}{'p99':>8}{'first byte':>12}{'of many':>9}{'calls/s':>9}{'of direct':>10}{'CPU':>7}"
    f"{'resident':>10}"
)


def table(
    rows: Mapping[str, dict[bool, Figures]], resident: Mapping[str, float], names: Mapping[bool, str]
) -> list[str]:
    """Lines, each candidate against `direct`. `names`: of each way."""
    lines = []
    for stream, way in names.items():
        base = rows["direct"][stream]
        for name, figures in rows.items():
            if (one := figures.get(stream)) is None:
                lines.append(f"{name:14}{way:10}  does not answer")
                continue
            less = Figures(0, 0, 0, 0, 0, 0) if one is base else base
            first = f"{one.first - less.first:.2f}" if stream else ""
            of_many = f"{one.of_many - less.of_many:.2f}" if stream else ""
            lines.append(
                f"{name:14}{way:10}{one.p50 - less.p50:>10.2f}{one.p99 - less.p99:>8.2f}"
                f"{first:>12}{of_many:>9}{one.rate:>9.0f}{one.rate / base.rate:>10.2f}{one.cpu:>7.2f}"
                f"{resident[name]:>10.0f}"
            )
    return lines


@contextlib.contextmanager
def spawned(target: Callable[..., None], *arguments: object) -> Iterator[int]:
    """A process of this benchmark; its pid."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def started(command: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator[int]:
    """Another program; its pid. What it says is in a file of `folder`."""
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, stdout=out, stderr=out)
        try:
            yield process.pid
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


@contextlib.contextmanager
def litellm(folder: Path, cache: Path, engine_url: str, port: int) -> Iterator[Candidate]:
    """LiteLLM's proxy with one worker."""
    home = cache / "litellm"
    if not (home / "bin" / "litellm").exists():
        subprocess.run([str(UV), "venv", "-q", "-p", sys.executable, str(home)], check=True)
        subprocess.run(
            [str(UV), "pip", "install", "-q", "-p", str(home / "bin" / "python"), "litellm[proxy]"], check=True
        )
    settings = folder / "litellm.yaml"
    params = {"model": "openai/m", "api_base": f"{engine_url}/v1", "api_key": "none"}
    settings.write_bytes(orjson.dumps({"model_list": [{"model_name": "m", "litellm_params": params}]}))
    command = [str(home / "bin" / "litellm"), "--config", str(settings), "--port", str(port), "--host", "127.0.0.1"]
    key = f"sk-{secrets.token_hex(32)}"  # it does not start without one
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": key}
    with started(command, folder, quiet) as pid:
        yield Candidate("litellm", f"http://127.0.0.1:{port}", (pid,), {"authorization": f"Bearer {key}"})


@contextlib.contextmanager
def portkey(folder: Path, cache: Path, engine_url: str, port: int) -> Iterator[Candidate]:
    """Portkey's gateway on Node."""
    home = cache / "portkey"
    program = home / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    if not program.exists():
        home.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", str(home), "@portkey-ai/gateway"], check=True)
    with started(["node", str(program), f"--port={port}", "--headless"], folder, {"NODE_ENV": "production"}) as pid:
        headers = {
            "x-portkey-provider": "openai",
            "x-portkey-custom-host": f"{engine_url}/v1",
            "authorization": "Bearer none",
        }
        yield Candidate("portkey", f"http://127.0.0.1:{port}", (pid,), headers)


PEERS = {"litellm": litellm, "portkey": portkey}


def candidates(names: list[str], folder: Path, cache: Path, engine_url: str, engine_pid: int) -> Iterator[Candidate]:
    """Each while it runs."""
    from tests.support import chat_tokenizer

    yield Candidate("direct", engine_url, (engine_pid,), {})
    port, other, *ports = free_ports(2 + len(names))
    with spawned(passthrough, port, engine_url, PATH) as pid:
        yield Candidate("pass-through", f"http://127.0.0.1:{port}", (pid,), {})
    tokenizer = chat_tokenizer.write(folder / "tokenizer")
    with spawned(gateway, other, engine_url, folder / "capture", tokenizer) as pid:
        yield Candidate("gateway", f"http://127.0.0.1:{other}", (pid,), {}, fresh=True)
    for name, port in zip(names, ports, strict=True):
        with PEERS[name](folder, cache, engine_url, port) as peer:
            yield peer


def main() -> None:
    """Start one after the other, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1, help="rounds over all of them")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")
    parser.add_argument("--tokens", type=int, default=50, help="tokens of a reply")
    parser.add_argument("--peer", action="append", default=[], choices=sorted(PEERS), help="may be repeated")
    parser.add_argument("--cache", type=Path, help="where peers are installed, and found again")
    parser.add_argument("--pause-ms", type=float, default=10.0, help="between two tokens of rows one by one; 0: none")
    parser.add_argument("--streams", type=int, default=64, help="how many calls are in flight")
    given = parser.parse_args()
    print(f"{given.tokens} tokens a reply, {len(PROMPT)} characters a prompt, {os.cpu_count()} cores, capture on")
    with tempfile.TemporaryDirectory() as name:
        for number in range(given.times):
            folder = Path(name) / str(number)
            folder.mkdir()
            cache = (given.cache or Path(name) / "peers").absolute()
            (port,) = free_ports(1)
            print(HEAD)
            for pause_s in (0.0, given.pause_ms / 1e3) if given.pause_ms else (0.0,):
                names = {True: "one by one"} if pause_s else {False: "plain", True: "streamed"}
                rows: dict[str, dict[bool, Figures]] = {}
                resident: dict[str, float] = {}
                with spawned(engine, port, given.tokens, pause_s) as pid:
                    for candidate in candidates(given.peer, folder, cache, f"http://127.0.0.1:{port}", pid):
                        at = int(candidate.url.rpartition(":")[2])
                        wait_until(lambda at=at: is_listening("127.0.0.1", at), candidate.name, START_S)
                        load = measured(candidate, given.seconds, given.tokens, tuple(names), given.streams)
                        rows[candidate.name] = uvloop.run(load)
                        resident[candidate.name] = candidate.resident()
                print("\n".join(table(rows, resident, names)), flush=True)


if __name__ == "__main__":
    main()
