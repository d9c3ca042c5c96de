"""`millrace a2a`: real clients of the A2A SDK and a real agent, through us: the same words, and the episodes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from a2a.client import ClientConfig, create_client
from a2a.helpers import proto_helpers as made
from a2a.types.a2a_pb2 import CancelTaskRequest, GetTaskRequest, Role, SendMessageConfiguration, SendMessageRequest
from aiohttp import web
from google.protobuf.json_format import MessageToDict

from millrace.infra.process.net import free_ports
from millrace.producers.intake.a2a_proxy import A2aProxy, Children
from millrace.producers.intake.capture import Capture
from millrace.producers.intake.conversation import Owner
from millrace.producers.intake.spool import Spool
from tests.support.gateway_world import World
from tests.support.mcp_captured import MILLRACE, PATIENCE_S, ROOT, environment, pairs, recorded, until

pytestmark = pytest.mark.slow

BINDINGS = ["JSONRPC", "HTTP+JSON"]
KILLS = 4


@pytest.fixture(scope="module")
def far() -> Iterator[str]:
    """The origin of a real agent, in a process of its own."""
    (port,) = free_ports(1)
    running = subprocess.Popen([sys.executable, "-m", "tests.support.a2a_agent", str(port)], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and running.poll() is None:
        with suppress(httpx.HTTPError):
            httpx.get(f"{url}/seen")
            break
        time.sleep(0.05)
    yield url
    running.kill()
    running.wait()


class Setup:
    """An agent, the proxy before it, and a gateway with a session."""

    def __init__(self, w: World, session: dict[str, str]) -> None:
        self.w, self.session = w, session
        self.url = self.plain = ""
        self.said: list[str] = []

    def seen(self) -> list[dict[str, str]]:
        """Headers that the agent got, each once."""
        return list(httpx.get(f"{self.plain}/seen").json())

    async def settled(self, count: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The calls of the client's own episode, once so many have results."""

        def there() -> list[tuple[dict[str, Any], dict[str, Any]]]:
            found = pairs(self.w.events(self.session["session"]))
            return [(call, result) for call, result in found if result is not None]

        await until(lambda: len(there()) >= count)
        return there()

    async def children(self, count: int) -> list[list[dict[str, Any]]]:
        """The events of each child, once so many have ended."""
        await until(lambda: len([1 for event in self.w.events() if event["kind"] == "episode_ended"]) >= count)
        out: dict[str, list[dict[str, Any]]] = {}
        for event in self.w.events():
            if event["parent_trajectory"] is not None:
                out.setdefault(event["trajectory"], []).append(event)
        return list(out.values())


@asynccontextmanager
async def before(tmp_path: Path, far: str, *, hands_on: bool = True, may_start: bool = True) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        w = await stack.enter_async_context(recorded(tmp_path / "gateway"))
        setup = Setup(w, await w.start())
        setup.plain = far
        setup.seen()
        capture = Capture(Spool(tmp_path / "spool"), setup.said.append)
        stack.callback(capture.close, 10.0)
        owner = Owner(setup.session["api_key"], f"{w.url}/v1")
        key = str(w.gateway.options.rollout_key) if may_start else setup.session["api_key"]
        children = Children(key, hands_on)
        proxy = A2aProxy(
            setup.plain, "helper", capture, owner.base_url, owner, setup.said.append, children=children
        )  # fmt: skip
        await proxy.open()
        stack.push_async_callback(proxy.close)
        runner = web.ServerRunner(web.Server(proxy.handle, handler_cancellation=True), shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        setup.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield setup


@asynccontextmanager
async def client(url: str, binding: str, *, streaming: bool = True) -> AsyncIterator[Any]:
    async with httpx.AsyncClient(timeout=60) as http:
        config = ClientConfig(httpx_client=http, supported_protocol_bindings=[binding], streaming=streaming)
        async with await create_client(url, config) as one:
            yield one


def message(word: str, **ids: str) -> SendMessageRequest:
    return SendMessageRequest(message=made.new_text_message(word, role=Role.ROLE_USER, **ids))


async def heard(one: Any, request: SendMessageRequest) -> list[dict[str, Any]]:
    """What a client is told, without what is told apart by chance."""
    return [plain(MessageToDict(said)) async for said in one.send_message(request)]


def plain(said: Any) -> Any:
    if isinstance(said, list):
        return [plain(one) for one in said]
    if isinstance(said, dict):
        return {name: plain(value) for name, value in said.items() if not name.endswith("Id") and name not in CHANCE}
    return said


CHANCE = {"id", "timestamp"}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_client_hears_the_same_and_each_message_is_a_delegation(
    tmp_path: Path, far: str, binding: str, streaming: bool
) -> None:
    words = ["say hello", "work", "fail"]
    async with before(tmp_path, far) as s:
        told = []
        for url in (s.plain, s.url):
            async with client(url, binding, streaming=streaming) as one:
                told.append([await heard(one, message(word)) for word in words])
        assert told[0] == told[1]
        found = await s.settled(3)
        assert [json.loads(call["arguments"])["parts"][0]["text"] for call, _ in found] == words
        assert [(call["name"], result["status"]) for call, result in found] == [
            ("helper", "ok"), ("helper", "ok"), ("helper", "error")
        ]  # fmt: skip
        said, worked, failed = (json.loads(result["content"]) for _, result in found)
        assert said["parts"][0]["text"] == "hello"
        texts = [part["text"] for artifact in worked["artifacts"] for part in artifact["parts"]]
        assert (texts, worked["status"]["state"]) == (["one ", "work"], "TASK_STATE_COMPLETED")
        assert failed["status"]["message"]["parts"][0]["text"] == "no luck"
        children = await s.children(3)
        assert [child[-1]["data"]["status"] for child in children] == ["completed", "completed", "failed"]
        for child, (call, _) in zip(children, found, strict=True):
            assert {event["spawn_call"] for event in child} == {call["call_id"]}
            assert {event["parent_trajectory"] for event in child} == {s.session["session"]}
            assert {event["root_trajectory"] for event in child} == {s.session["session"]}
            assert child[1]["data"]["content"] == call["arguments"]
        if streaming:
            origins = [event["data"]["origin"] for event in children[1][1:-1]]
            assert origins == ["a2a:message", "a2a:task", "a2a:status", "a2a:artifact", "a2a:artifact", "a2a:status"]


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_task_that_waits_for_input_goes_on_in_its_child(tmp_path: Path, far: str, binding: str) -> None:
    async with before(tmp_path, far) as s, client(s.url, binding) as one:
        (task, *_) = [said.task async for said in one.send_message(message("ask")) if said.HasField("task")]
        await heard(one, message("this", task_id=task.id, context_id=task.context_id))
        (_, asked), (_, answered) = await s.settled(2)
        assert json.loads(asked["content"])["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
        assert json.loads(answered["content"])["status"]["state"] == "TASK_STATE_COMPLETED"
        (child,) = await s.children(1)
        told = [event["data"]["origin"] for event in child if event["kind"] == "observation"]
        assert told.count("a2a:message") == 2
        assert child[-1]["kind"] == "episode_ended"


@pytest.mark.parametrize("binding", BINDINGS)
async def test_what_comes_of_a_task_may_be_asked_for_later(tmp_path: Path, far: str, binding: str) -> None:
    async with before(tmp_path, far) as s, client(s.url, binding, streaming=False) as one:
        request = message("hang")
        request.configuration.CopyFrom(SendMessageConfiguration(return_immediately=True))
        async for said in one.send_message(request):
            task = said.task
        await until(lambda: [result for _, result in pairs(s.w.events(s.session["session"]))] == [None])
        await one.get_task(GetTaskRequest(id=task.id))
        await one.cancel_task(CancelTaskRequest(id=task.id))
        ((_, result),) = await s.settled(1)
        assert result["status"] == "cancelled"
        (child,) = await s.children(1)
        assert child[-1]["data"]["status"] == "aborted"


async def test_the_older_version_is_read_too(tmp_path: Path, far: str) -> None:
    async with before(tmp_path, far) as s, aiohttp.ClientSession() as http:
        for method in ("message/send", "message/stream"):
            said = {"role": "user", "messageId": method, "kind": "message", "parts": [{"kind": "text", "text": "work"}]}
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"message": said}}
            async with http.post(f"{s.url}/rpc", json=body, headers={"a2a-version": "0.3"}) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
        for _, result in await s.settled(2):
            content = json.loads(result["content"])
            assert (result["status"], content["status"]["state"]) == ("ok", "completed")
            assert [part["text"] for a in content["artifacts"] for part in a["parts"]] == ["one ", "work"]
        assert len(await s.children(2)) == 2


async def test_the_card_names_us_alone(tmp_path: Path, far: str) -> None:
    async with before(tmp_path, far) as s, aiohttp.ClientSession() as http:
        for base in (s.url, f"{s.url}/{s.session['api_key']}"):
            async with http.get(f"{base}/.well-known/agent-card.json") as answer:
                card = await answer.json()
            urls = {one["url"] for one in card["supportedInterfaces"]}
            assert urls == {f"{base}/rpc", base}
            assert card["name"] == "obedient"


async def test_the_agent_is_handed_its_own_key_and_no_other(tmp_path: Path, far: str) -> None:
    async with before(tmp_path, far) as s, client(s.url, "JSONRPC") as one:
        await heard(one, message("work"))
        await s.settled(1)
        (child,) = await s.children(1)
        seen = s.seen()
        handed = seen[-1]
        assert handed["x-millrace-url"] == f"{s.w.url}/v1"
        assert handed["x-millrace-key"].startswith(f"mr-{child[0]['trajectory']}.")
        assert s.session["api_key"] not in str(seen)
    async with before(tmp_path / "silent", far, hands_on=False) as s, client(s.url, "JSONRPC") as one:
        await heard(one, message("work"))
        assert not any("x-millrace-key" in headers for headers in s.seen())
        assert len(await s.children(1)) == 1


async def test_without_a_child_the_call_and_its_result_are_kept(tmp_path: Path, far: str) -> None:
    async with before(tmp_path, far, may_start=False) as s, client(s.url, "JSONRPC") as one:
        await heard(one, message("work"))
        ((_, result),) = await s.settled(1)
        assert result["status"] == "ok"
        assert any("no session of its own" in said for said in s.said)
        assert {event["trajectory"] for event in s.w.events()} == {s.session["session"]}


async def test_an_agent_that_is_away_is_a_result_and_ends_the_child(tmp_path: Path, far: str) -> None:
    async with before(tmp_path, far) as s:
        (port,) = free_ports(1)
        capture = Capture(Spool(tmp_path / "other"), s.said.append)
        owner = Owner(s.session["api_key"], f"{s.w.url}/v1")
        key = str(s.w.gateway.options.rollout_key)
        proxy = A2aProxy(
            f"http://127.0.0.1:{port}", "helper", capture, owner.base_url, owner, s.said.append,
            children=Children(key, True),
        )  # fmt: skip
        await proxy.open()
        runner = web.ServerRunner(web.Server(proxy.handle), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": {"parts": []}}}
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/rpc"
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            assert answer.status == 502
        ((_, result),) = await s.settled(1)
        assert json.loads(result["content"]) == {"http_status": 502}
        (child,) = await s.children(1)
        assert child[-1]["data"]["status"] == "failed"
        await runner.cleanup()
        await proxy.close()
        await asyncio.to_thread(capture.close, 10.0)


async def test_what_a_client_heard_outlives_the_proxy(tmp_path: Path, far: str) -> None:
    """Real processes, each killed behind an answer; the last one sends what the others left."""
    async with recorded(tmp_path / "gateway") as w:
        session = await w.start()
        key = {"MILLRACE_GATEWAY_KEY": str(w.gateway.options.rollout_key)}
        told = environment(tmp_path / "spool", session, f"{w.url}/v1") | key
        for last in (*[False] * KILLS, True):
            with subprocess.Popen([*MILLRACE, "a2a", "--url", far], env=told, stdout=subprocess.PIPE) as ours:
                assert ours.stdout is not None
                line = await asyncio.to_thread(ours.stdout.readline)
                if not last:
                    async with client(line.split()[-1].decode(), "JSONRPC") as one:
                        await heard(one, message("work"))
                    ours.kill()
                    continue
                await until(lambda: [e["kind"] for e in w.events()].count("episode_ended") == KILLS)
                ours.terminate()
        found = pairs(w.events(session["session"]))
        assert [result and result["status"] for _, result in found] == ["ok"] * KILLS
        children = {event["trajectory"] for event in w.events() if event["parent_trajectory"] is not None}
        assert len(children) == KILLS
        for child in children:
            kinds = [event["kind"] for event in w.events(child)]
            assert kinds == ["episode_started", *["observation"] * 6, "episode_ended"]
