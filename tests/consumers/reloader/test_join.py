"""An engine that joins by the log alone: as a process, from its announcement to its end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from millrace.consumers.reloader import join
from millrace.consumers.reloader.join import EngineChild
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.kinds import open_engine
from millrace.infra.log.base import TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import TopicSizes
from millrace.infra.process.net import free_ports
from millrace.schemas import codec
from millrace.schemas.records import WorkerStatus
from tests.support.announced import POLICY, announce, weight_event
from tests.support.engines import complete, until
from tests.support.joined import RUN, environment_of, spawn
from tests.support.learners import ROOT

NAMESPACE = "joined"
WAITS = (sys.executable, "-c", "import time; print(flush=True); time.sleep(600)")


async def test_an_engine_that_ends_is_started_again_and_ends_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "PAUSE_S", 0.01)
    child, over = EngineChild(WAITS), asyncio.Event()
    assert child.end() is None
    running = asyncio.create_task(child.run(over))
    pids: list[int] = []
    for _ in range(3):
        await until(lambda: child._process is not None and child._process.returncode is None, 30)
        pids.append(child.end() or 0)
        await until(lambda: not psutil.pid_exists(pids[-1]), 30)
    assert len(set(pids)) == 3
    assert all(pids)
    await until(lambda: child._process is not None and child._process.returncode is None, 30)
    over.set()
    await asyncio.wait_for(running, 30)
    assert child.end() is None


async def test_nothing_of_an_engine_lives_on_beside_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "PAUSE_S", 0.01)
    pids = tmp_path / "pids"
    child, over = EngineChild(("sh", "-c", f"sleep 600 & echo $! >> {pids}; wait")), asyncio.Event()
    running = asyncio.create_task(child.run(over))
    for start in range(1, 4):
        await until(lambda start=start: pids.exists() and len(pids.read_text().split()) == start, 30)
        below = int(pids.read_text().split()[-1])
        assert psutil.pid_exists(below)
        if start < 3:
            assert child._process is not None
            child._process.kill()
        else:
            over.set()
        await until(lambda below=below: not _lives(below), 30)
    await asyncio.wait_for(running, 30)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_an_engine_ends_with_who_started_it_however_that_ends(tmp_path: Path) -> None:
    source = (
        "import asyncio, sys; from millrace.consumers.reloader.join import EngineChild;"
        f"asyncio.run(EngineChild({WAITS!r}).run(asyncio.Event()))"
    )
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    parent.stdout.readline()
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    child.wait(30)


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.parametrize("end", ["drain", "SIGTERM"])
async def test_it_joins_by_the_log_alone_and_leaves_without_losing_a_call(
    broker: str, folders: list[Path], tmp_path: Path, end: str
) -> None:
    namespace = f"{NAMESPACE}-{end.lower()}"
    weights, workers = f"{namespace}.{POLICY}.weights", f"{namespace}.workers"
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    environment = environment_of(broker, namespace, tmp_path / "home", url)
    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(weights, 1), TopicSpec(workers, 1, {"cleanup.policy": "compact"})])
        announce(bus, weight_event(0, folders[0]), weights)

        def newest() -> WorkerStatus | None:
            statuses = [codec.decode_as("WorkerStatus", one.value) for one in bus.read(workers, 0) if one.value]
            return next((one for one in reversed(statuses) if one["role"] == "engine"), None)

        def stands(state: str) -> bool:
            status = newest()
            return status is not None and status["state"] == state and status["running"] is not None

        process = spawn(("engine", "join"), environment, tmp_path / "log")
        try:
            await until(lambda: stands("serving"))
            status = newest()
            assert status is not None
            assert (status["url"], status["kind"], status["version"], status["running"]) == (url, "inprocess", 0, 0)
            key = (tmp_path / "home" / "keys" / "engine").read_text().strip()
            engine = open_engine(status["kind"] or "", url, resubmits=False, key=key)
            calling = asyncio.create_task(complete(engine, [22, 10, 14, 40], Sampling(300, ignore_eos=True)))
            bearer = {"authorization": f"Bearer {key}"}
            await until(lambda: httpx.get(f"{url}/state", headers=bearer).json()["running"] == 1)
            if end == "drain":
                told = subprocess.run([*RUN, "drain", url, "--wait"], env=environment, capture_output=True, timeout=120)
                assert (told.returncode, b"is drained" in told.stdout) == (0, True), told.stderr.decode()
            else:
                undo = [*RUN, "drain", url, "--undo", "--wait"]
                told = subprocess.run(undo, env=environment, capture_output=True, timeout=120)
                assert (told.returncode, b"takes calls again" in told.stdout) == (0, True), told.stderr.decode()
                process.send_signal(signal.SIGTERM)
            await until(lambda: process.poll() is not None)
            assert process.returncode == 0, (tmp_path / "log").read_text()
            (reply,) = await calling
            assert (len(reply.token_ids), reply.finish_reason) == (300, "length")
            assert stands("stopped")
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            await engine.close()
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.kafka
async def test_a_gateway_finds_engines_by_the_log_and_a_drain_fails_no_call(
    broker: str, folders: list[Path], tmp_path: Path
) -> None:
    namespace, home = f"{NAMESPACE}-gateway", tmp_path / "home"
    ports = free_ports(4)
    nobody, *urls = (f"http://127.0.0.1:{port}" for port in ports[:3])
    gateway = f"http://127.0.0.1:{ports[3]}"
    commands: list[tuple[tuple[str, ...], str, dict[str, str]]] = [(("engine", "join"), url, {}) for url in urls]
    commands.append((("gateway",), nobody, {"GATEWAY__PORT": str(ports[3])}))
    processes = []
    statuses: list[int] = []
    over = asyncio.Event()

    async def call_on(http: httpx.AsyncClient, number: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            messages = [{"role": "user", "content": f"{number} + {count} ="}]
            body = {"model": POLICY, "messages": messages, "max_tokens": 30, "stream": count % 2 == 0}
            answer = await http.post(f"{gateway}/v1/chat/completions", json=body)
            statuses.append(answer.status_code if "error" not in answer.text else 0)

    with KafkaBus(broker) as bus:
        bus.ensure_topics(TopicSizes(namespace, POLICY).specs())
        announce(bus, weight_event(0, folders[0]), f"{namespace}.{POLICY}.weights")
    try:
        for at, (command, url, more) in enumerate(commands):
            environment = environment_of(broker, namespace, home, url, **more)
            processes.append(spawn(command, environment, tmp_path / f"{at}.log"))
        async with httpx.AsyncClient(timeout=120) as http:

            async def standing() -> dict[str, Any]:
                try:
                    answer = (await http.get(f"{gateway}/health", headers={"authorization": "Bearer x"})).json()
                except httpx.TransportError:
                    return {}
                return dict(answer.get("engines", {}))

            async def are_served() -> bool:
                engines = await standing()
                return all(engines.get(url, {}).get("version") == 0 for url in urls)

            await until(are_served)
            calls = [asyncio.create_task(call_on(http, number)) for number in range(8)]

            async def both_work() -> bool:
                engines = await standing()
                return all(engines[url]["running"] for url in urls)

            await until(both_work)
            environment = environment_of(broker, namespace, home, nobody)
            telling = await asyncio.create_subprocess_exec(*RUN, "drain", urls[0], "--wait", env=environment)
            assert await asyncio.wait_for(telling.wait(), 200) == 0
            await until(lambda: processes[0].poll() is not None)
            count = len(statuses)
            await until(lambda: len(statuses) > count + 8)
            over.set()
            await asyncio.gather(*calls)
            assert set(statuses) == {200}
            engines = await standing()
            assert engines[urls[0]]["draining"] is True
            assert processes[0].returncode == 0
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)
