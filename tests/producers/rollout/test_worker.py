"""Workers against a real gateway and an in-memory log: grants in, ended episodes out, whatever agents do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from millrace.apps.demo import sort_agent
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.errors import ConfigError, RolloutError
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.producers.rollout.agents import load_agent, sync_agent
from millrace.producers.rollout.episodes import AGAIN_S, Runner
from millrace.producers.rollout.trouble import Trouble
from millrace.producers.rollout.worker import GrantProgress, Names, ResolvedTickets, RolloutWorker
from millrace.schemas import codec
from tests.support import logged
from tests.support.gateway_world import POLICY, WORKERS, ScriptedEngine, World, world

NAMES = Names("t", POLICY, "worker-0")
TASK = {"messages": [{"role": "user", "content": "312"}], "answer": "123"}


def grant(ticket: int, size: int = 3, **fields: Any) -> dict[str, Any]:
    return {
        "ticket": ticket, "policy": POLICY, "prompt_id": f"p{ticket}", "task": json.dumps(TASK), "group_size": size,
        "samples": list(range(size)), "round": 0, "min_version": 0, "deadline": 9, "lease_until": 0,
        "reward_deadline_ms": 1000, "awaits": ["verifier"], "time": 0, **fields,
    }  # fmt: skip


def put(w: World, *grants: dict[str, Any]) -> None:
    with w.bus.publisher() as publisher:
        for one in grants:
            out = Outgoing(NAMES.grants, b"%d" % one["ticket"], codec.encode("Grant", one), partition=one["ticket"] % 2)
            publisher.publish(out).result(5)


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    engine = ScriptedEngine(lambda prompt, sampling, choice: renderer.tokenizer.encode("123<|im_end|>"))
    async with world(tmp_path, renderer, engine) as w:
        w.bus.ensure_topics([TopicSpec(NAMES.grants, 2), TopicSpec(NAMES.resolutions, 1)])
        w.acknowledge(0)
        yield w


@asynccontextmanager
async def working(
    w: World, agent: Any = sort_agent.agent, name: str = "worker-0", **kw: Any
) -> AsyncIterator[RolloutWorker]:
    runner = Runner(agent, f"{w.url}/v1", WORKERS, **kw)
    worker, stop = RolloutWorker(w.bus, Names("t", POLICY, name), runner), asyncio.Event()
    running = asyncio.create_task(worker.run(stop, grace_s=1.0))
    try:
        yield worker
    finally:
        stop.set()
        await running
        await runner.close()


async def until(condition: Any, timeout_s: float = 120.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


def ended(w: World) -> list[dict[str, Any]]:
    return [event for event in w.events() if event["kind"] == "episode_ended"]


def committed(w: World) -> dict[int, int]:
    with w.bus.member(NAMES.group, NAMES.grants) as member:
        return member.committed_offsets({0, 1})


async def test_every_sample_of_every_grant_ends_once(w: World):
    put(w, *(grant(n) for n in range(6)))
    async with working(w, concurrency=4):
        await until(lambda: len(ended(w)) == 18)
    starts = {e["trajectory"]: e for e in w.events() if e["kind"] == "episode_started"}
    assert Counter((e["group"], e["data"]["sample"]) for e in starts.values()) == Counter(
        (str(n), s) for n in range(6) for s in range(3)
    )
    first = starts[ended(w)[0]["trajectory"]]["data"]
    assert (first["deadline"], first["awaits"], json.loads(first["task"])) == (9, ["verifier"], TASK)
    assert {e["data"]["output"] for e in ended(w)} == {"123"}
    assert {e["data"]["status"] for e in ended(w)} == {"completed"}
    assert all(call["trainable"] for call in w.calls())
    assert committed(w) == w.bus.ends(NAMES.grants)


async def test_grants_begin_in_the_order_of_their_tickets_whatever_their_partition(w: World):
    put(w, *(grant(n, size=1) for n in (0, 6, 8, 10, 1, 3, 5, 7)))
    async with working(w, concurrency=1):
        await until(lambda: len(ended(w)) == 8)
    starts = sorted((e["event_time"], e["group"]) for e in w.events() if e["kind"] == "episode_started")
    assert [group for _, group in starts] == ["0", "1", "3", "5", "6", "7", "8", "10"]


async def test_what_runs_no_more_is_finished_and_will_be_committed(w: World, monkeypatch: pytest.MonkeyPatch):
    """A worker that stops commits once nothing runs: by then the grant that ended last must count."""
    positions = []
    popped = RolloutWorker._end_grant

    def ending(worker: RolloutWorker, *arguments: Any) -> None:
        popped(worker, *arguments)
        positions.append(worker.progress.position(0))

    monkeypatch.setattr(RolloutWorker, "_end_grant", ending)
    put(w, grant(0))
    async with working(w):
        await until(lambda: positions)
    assert positions == [1]


async def test_a_grant_that_outlives_its_membership_is_finished_in_the_next(w: World):
    """The first three samples wait; the commit of the next grant is refused, so the worker joins again."""
    gate, calls = asyncio.Event(), count()

    async def agent(task: dict[str, Any], base_url: str, api_key: str) -> str:
        if next(calls) < 3:
            await gate.wait()
        return "123"

    put(w, grant(0))
    async with working(w, agent, concurrency=8) as worker:
        await until(lambda: worker.progress.position(0) == 0)
        former = worker.progress
        w.bus.transactor(f"{NAMES.group}.{NAMES.worker}").close()
        put(w, grant(1))
        await until(lambda: worker.progress is not former and worker.progress.position(0) == 0)
        gate.set()
    assert committed(w) == {0: 1, 1: 1}
    assert Counter(e["group"] for e in w.events() if e["kind"] == "episode_started")["0"] == 3, "it ran once"


async def test_agents_that_fail_end_their_episodes_with_the_reason(w: World):
    async def agent(task: dict[str, Any], base_url: str, api_key: str) -> str:
        if len(ended(w)) == 0:
            raise ValueError("no idea")
        await asyncio.sleep(30)
        return "never"

    put(w, grant(0, 2))
    async with working(w, agent, concurrency=1, timeout_s=1.0):
        await until(lambda: len(ended(w)) == 2)
    bodies = [event["data"] for event in ended(w)]
    assert [body["status"] for body in bodies] == ["failed", "failed"]
    assert bodies[0]["reason"] == "ValueError: no idea"
    assert bodies[1]["stop_condition"] == "timeout"


async def test_a_bug_in_the_agent_is_shown_and_burns_no_tasks(w: World, caplog: pytest.LogCaptureFixture):
    mended, handed = asyncio.Event(), []

    async def agent(task: dict[str, Any], base_url: str, api_key: str) -> str:
        if not mended.is_set():
            raise KeyError("no such key")
        return "123"

    class Loader:
        failed = None

        def start(self) -> None:
            handed.append(True)

        def stop(self) -> None:
            handed.append(False)

    put(w, *(grant(n) for n in range(40)))
    trouble = Trouble(in_a_row=5, trial_s=0.2)
    async with working(w, agent, concurrency=2, trouble=trouble) as worker:
        worker.loader = Loader()  # type: ignore[assignment]
        await until(lambda: trouble.is_broken)
        await until(lambda: handed and not handed[-1])
        before = len(ended(w))
        await until(lambda: len(ended(w)) > before + 1, 60)
        assert len(ended(w)) < 40, "trials only, one after another"
        assert worker.runner.trouble.message.startswith("the agent failed ")
        assert committed(w).get(0, 0) < 5
        mended.set()
        await until(lambda: len(ended(w)) == 120, 60)
        assert handed[-1]
    traces = [record for record in logged.records(caplog) if record.exc_info and "the agent failed" in record.message]
    assert len(traces) == 1, "one trace for each kind of error"
    assert not trouble.message


async def test_resolved_tickets_are_skipped_and_others_run_again(w: World):
    put(w, grant(0), grant(2))
    resolution = {
        "kind": "expired", "policy": POLICY, "ticket": 0, "seq": None, "group": "0", "prompt_id": "p0",
        "solicited": True, "size": 3, "trajectories": [], "tokens": [], "rewards": [], "v_head": -1, "v_tail": -1,
        "min_version": 0, "deadline": 0, "reason": None, "setting": None, "time": 0,
    }  # fmt: skip
    with w.bus.publisher() as publisher:
        publisher.publish(Outgoing(NAMES.resolutions, b"0", codec.encode("Resolution", resolution))).result(5)
    async with working(w):
        await until(lambda: len(ended(w)) == 3)
        await until(lambda: committed(w).get(0) == w.bus.ends(NAMES.grants)[0])
    assert {event["group"] for event in ended(w)} == {"2"}


async def test_a_worker_that_stops_in_the_middle_leaves_the_grant_to_the_next(w: World):
    hold = asyncio.Event()

    async def agent(task: dict[str, Any], base_url: str, api_key: str) -> str:
        await hold.wait()
        return "late"

    put(w, grant(0), grant(2))
    async with working(w, agent):
        await until(lambda: len(w.gateway.sessions.live) == 6)
    assert ended(w) == []
    assert committed(w).get(0, 0) == 0
    async with working(w, name="worker-1"):
        await until(lambda: len(ended(w)) == 6)
    attempts = [e["attempt"] for e in w.events() if e["kind"] == "episode_started"]
    assert len(set(attempts)) == 12


async def test_two_workers_share_the_grants(w: World):
    put(w, *(grant(n, 2) for n in range(10)))
    async with working(w, concurrency=2), working(w, name="worker-1", concurrency=2):
        await until(lambda: len({e["trajectory"] for e in ended(w)}) >= 20)
        await until(lambda: committed(w) == w.bus.ends(NAMES.grants))
    assert {e["group"] for e in ended(w)} == {str(n) for n in range(10)}


async def test_a_sync_agent_sees_no_answer(w: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_sync_agent.py").write_text(
        "import openai\n"
        "def agent(task, base_url, api_key):\n"
        "    assert 'answer' not in task\n"
        "    client = openai.OpenAI(base_url=base_url, api_key=api_key)\n"
        "    return client.chat.completions.create(model='m', messages=task['messages']).choices[0].message.content\n"
    )
    monkeypatch.chdir(tmp_path)
    put(w, grant(0, 2))
    async with working(w, load_agent("my_sync_agent:agent")):
        await until(lambda: len(ended(w)) == 2)
    assert {event["data"]["output"] for event in ended(w)} == {"123"}


async def test_grants_wait_for_an_engine(w: World):
    """One that loads for minutes fails no episode: none begins before it serves."""
    w.acknowledge(0, state="starting")
    put(w, *(grant(n) for n in range(4)))
    async with working(w):
        await asyncio.sleep(3 * AGAIN_S)
        assert not w.gateway.sessions.live
        w.acknowledge(0)
        await until(lambda: len(ended(w)) == 12)
    assert {event["data"]["status"] for event in ended(w)} == {"completed"}


async def test_agents_that_hang_hold_nobody_up(w: World):
    """As many hang as run at once; the episodes after them end as they would have, and then the worker starts anew."""
    release, calls = threading.Event(), count()

    def agent(task: dict[str, Any], base_url: str, api_key: str) -> str:
        if next(calls) % 2 == 0:
            release.wait(600)
        return "123"

    trouble = Trouble(stuck_limit=3)
    runner = Runner(sync_agent(agent, trouble.stuck), f"{w.url}/v1", WORKERS, 1, 1.0, trouble=trouble)
    put(w, grant(0, 6))
    with pytest.raises(RolloutError, match="3 calls of the agent never returned"):
        await RolloutWorker(w.bus, NAMES, runner).run(asyncio.Event(), grace_s=1.0)
    release.set()
    await runner.close()
    assert [event["data"]["stop_condition"] for event in ended(w)][:4] == ["timeout", "agent", "timeout", "agent"]


@pytest.mark.parametrize("name", ["", "nothing", "no.such:agent", "json:nothing", "math:pi"])
def test_bad_agents_are_refused(name: str):
    with pytest.raises(ConfigError, match="agent"):
        load_agent(name)


def test_progress_never_passes_an_open_grant():
    progress = GrantProgress()
    assert progress.position(0) is None
    for offset in (3, 5, 9):
        progress.begin(0, offset)
    progress.finish(0, 5)
    assert progress.position(0) == 3
    progress.finish(0, 3)
    assert progress.position(0) == 9
    progress.finish(0, 9)
    assert progress.position(0) == 10
    progress.forget(0)
    assert progress.position(0) is None


def test_tickets_are_bits():
    tickets = ResolvedTickets()
    for ticket in (0, 7, 8, 100_000):
        assert ticket not in tickets
        tickets.add(ticket)
        assert ticket in tickets
    assert 99_999 not in tickets
    assert 10**9 not in tickets


def test_the_example_only_changes_url_and_key():
    assert sort_agent.connection("http://x/v1") is sort_agent.connection("http://x/v1")
    assert isinstance(sort_agent.connection("http://x/v1"), openai.AsyncOpenAI)
