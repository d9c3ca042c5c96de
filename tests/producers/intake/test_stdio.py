"""`millrace mcp -- command`: a real client and a real server, plain and through us; ends, signals, kills, odd bytes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, ClientSession, MCPError, StdioServerParameters, stdio_client

from millrace.infra.process.net import free_ports
from tests.support.mcp_captured import MILLRACE, ROOT, SERVER, environment, pairs, recorded, until

pytestmark = pytest.mark.slow

Talk = Callable[[StdioServerParameters], Awaitable[list[Any]]]
THROUGH = [*MILLRACE, "mcp", "--server", "calc", "--"]


def parameters(command: list[str], env: dict[str, str]) -> StdioServerParameters:
    return StdioServerParameters(command=command[0], args=command[1:], env=env, cwd=str(ROOT))


async def talk(client: Any) -> list[Any]:
    """What a client sees of each tool."""
    said: list[Any] = [sorted(tool.name for tool in (await client.list_tools()).tools)]
    for name, arguments in (
        ("add", {"a": 3, "b": 4}),
        ("fail", {"why": "Zürich"}),
        ("repeat", {"text": "ü", "times": 70_000}),
        ("nonesuch", {}),
    ):
        try:
            said.append((await client.call_tool(name, arguments)).model_dump(mode="json", by_alias=True))
        except MCPError as error:
            said.append(str(error))
    return said


async def handshake(server: StdioServerParameters) -> list[Any]:
    """The era of 2025-11-25."""
    async with stdio_client(server) as (read, write), ClientSession(read, write) as client:
        await client.initialize()
        return await talk(client)


async def stateless(server: StdioServerParameters) -> list[Any]:
    """The era of 2026-07-28."""
    async with Client(server, mode="2026-07-28") as client:
        return await talk(client)


@pytest.mark.parametrize("era", [handshake, stateless])
async def test_a_client_sees_the_same_and_the_episode_has_each_call(tmp_path: Path, era: Talk) -> None:
    plain = await era(parameters(SERVER, environment(tmp_path)))
    async with recorded(tmp_path / "gateway") as w:
        session = await w.start()
        env = environment(tmp_path / "spool", session, f"{w.url}/v1")
        assert await era(parameters([*THROUGH, *SERVER], env)) == plain
        await until(lambda: len([1 for _, result in pairs(w.events()) if result]) == 4)
        found = pairs(w.events(session["session"]))
        assert [(call["name"], result["status"]) for call, result in found if result] == [
            ("add", "ok"),
            ("fail", "error"),
            ("repeat", "ok"),
            ("nonesuch", "error"),
        ]
        for call, _ in found:
            assert (call["join"], call["asked_id"], call["server"]) == ("absent", None, "calc")
        (add, said), (_, failed), (_, long), _ = found
        assert json.loads(add["arguments"]) == {"a": 3, "b": 4}
        assert json.loads(said["content"])["structuredContent"] == {"result": 7.0}
        assert "fail" in json.loads(failed["content"])["content"][0]["text"]
        assert json.loads(long["content"])["content"][0]["text"] == "ü" * 70_000


async def test_the_server_does_not_get_the_key(tmp_path: Path) -> None:
    async with recorded(tmp_path / "gateway") as w:
        session = await w.start()
        env = {**environment(tmp_path / "spool", session, f"{w.url}/v1"), "OTHER": "kept"}
        async with Client(parameters([*THROUGH, *SERVER], env)) as client:
            for name, value in (("MILLRACE_SESSION_KEY", "nothing"), ("OTHER", "kept")):
                (content,) = (await client.call_tool("environment", {"name": name})).content
                assert content.text == value


# ---------------------------------------------------------------------- bytes

COPY = "import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"


def through(tmp_path: Path, *command: str, session: dict[str, str] | None = None, url: str = "", **options: Any) -> Any:
    """The command behind us, as a process."""
    return subprocess.Popen(
        [*MILLRACE, "mcp", *options.pop("flags", ()), "--", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=options.pop("stderr", subprocess.PIPE),
        env=environment(tmp_path / "spool", session, url),
        **options,
    )


KEY = {"api_key": "mr-0.0"}
AWAY = "http://127.0.0.1:1/v1"
CALL = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"f"}}\n'
ODD = {
    "garbage": b"nonsense\n{\n\n}\x00\xff\xfe\r\n[[[[\n" + bytes(range(256)),
    "no end": CALL[:-1],
    "invalid UTF-8": b'{"id":1,"method":"tools/call","params":{"name":"f","arguments":"\xff\xc3"}}\n',
    "surrogates": b'{"id":"\\ud800","method":"tools/call","params":{"name":"\\ud800"}}\n',
    "deep": b"[" * 100_000 + b"\n",
    "50 MB": b'{"id":1,"method":"tools/call","params":{"name":"f","arguments":"' + b"x" * 50_000_000 + b'"}}\n',
    "70 MB": b"x" * 70_000_000 + b"\n" + CALL,
    "many": CALL * 3000,
    "nothing": b"",
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_bytes_pass_unaltered_whatever_they_are(tmp_path: Path, name: str, captured: bool) -> None:
    """Through `cat`, so that both directions are tried; the gateway is away."""
    process = through(tmp_path, sys.executable, "-c", COPY, session=KEY if captured else None, url=AWAY)
    out, err = process.communicate(ODD[name], timeout=240)
    assert out == ODD[name]
    assert process.returncode == 0
    assert b"Traceback" not in err


def test_what_could_not_be_read_is_said(tmp_path: Path) -> None:
    process = through(tmp_path, sys.executable, "-c", "input()", session=KEY, url=AWAY)
    _, err = process.communicate(b"nonsense\n" * 3, timeout=120)
    assert b"millrace: 1 messages that passed could not be read" in err
    assert b"3 messages that passed could not be read" in err


def test_each_line_passes_at_once_and_standard_error_is_the_servers(tmp_path: Path) -> None:
    echo = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True); sys.stderr.write(line)"
    process = through(tmp_path, sys.executable, "-c", echo)
    for line in (b"one\n", b"two\n"):
        process.stdin.write(line)
        process.stdin.flush()
        assert process.stdout.readline() == line.upper()
    _, err = process.communicate(timeout=120)
    assert err.endswith(b"one\ntwo\n")


def test_a_slow_reader_holds_up_its_own_direction_alone(tmp_path: Path) -> None:
    """The server writes far more than the pipes hold, which nobody reads, while it is sent as much."""
    script = (
        "import sys, threading\n"
        "out = threading.Thread(target=lambda: sys.stdout.buffer.write(b'y' * 5_000_000)); out.start()\n"
        "got = sys.stdin.buffer.read()\n"
        "print(len(got), file=sys.stderr, flush=True); out.join()"
    )
    process = through(tmp_path, sys.executable, "-c", script, session=KEY, url=AWAY)
    process.stdin.write(b"x" * 5_000_000)
    process.stdin.close()
    assert any(line == b"5000000\n" for line in process.stderr)
    assert process.stdout.read() == b"y" * 5_000_000
    assert process.wait(120) == 0


# ---------------------------------------------------------------------- ends


@pytest.mark.parametrize("status", [0, 1, 7, 255])
def test_the_exit_status_is_the_servers(tmp_path: Path, status: int) -> None:
    process = through(tmp_path, "sh", "-c", f"cat > /dev/null; exit {status}")
    process.communicate(b"", timeout=120)
    assert process.returncode == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGABRT])
def test_a_signal_that_ended_the_server_ends_us(tmp_path: Path, number: int) -> None:
    process = through(tmp_path, "sh", "-c", f"ulimit -c 0; kill -{number} $$")
    process.communicate(timeout=120)
    assert process.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_go_on_to_the_server(tmp_path: Path, number: int) -> None:
    script = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda number, frame: (print('got', number, flush=True), sys.exit(3)))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)"
    )
    process = through(tmp_path, sys.executable, "-c", script)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    assert process.stdout.read() == b"got %d\n" % number
    assert process.wait(120) == 3


def test_a_reader_that_leaves_ends_the_server(tmp_path: Path) -> None:
    process = through(tmp_path, "yes", stderr=subprocess.DEVNULL)
    assert process.stdout.read(2) == b"y\n"
    process.stdout.close()
    assert process.wait(120) == -signal.SIGPIPE


def test_a_server_that_ends_while_another_holds_its_output_open(tmp_path: Path) -> None:
    process = through(tmp_path, "sh", "-c", "sleep 1000 2> /dev/null & echo $!; exit 4")
    out, _ = process.communicate(timeout=120)
    os.kill(int(out), signal.SIGKILL)
    assert process.returncode == 4


@pytest.mark.parametrize(("command", "status"), [("nonesuch", 127), ("/", 126)])
def test_a_command_that_cannot_run_says_so(tmp_path: Path, command: str, status: int) -> None:
    process = through(tmp_path, command)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err.startswith(f"millrace: cannot run {command}: ".encode())) == (status, True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--session", "sk-1"], "this is not a session's own key"),
        (["--gateway", "nonsense"], "is no address of a gateway"),
        (["--gateway", "http://here:99999/v1"], "is no address of a gateway"),
        (["--url", "http://127.0.0.1:1/mcp"], "name one server"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused_at_once(tmp_path: Path, flags: list[str], said: str) -> None:
    process = through(tmp_path, "cat", flags=flags)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said in err.decode()


# ---------------------------------------------------------------------- the gateway is away, and kills


def echo_server() -> list[str]:
    script = (
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    id = json.loads(line)['id']\n"
        "    print(json.dumps({'id': id, 'result': {'content': [id]}}), flush=True)"
    )
    return [sys.executable, "-c", script]


def ask(process: Any, id: int) -> None:
    process.stdin.write(json.dumps({"id": id, "method": "tools/call", "params": {"name": "f"}}).encode() + b"\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["id"] == id


async def test_a_gateway_that_is_away_costs_nothing_and_gets_all_of_it_later(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/v1"
    async with recorded(tmp_path / "gateway", port) as w:
        session = await w.start()
    process = through(tmp_path, *echo_server(), session=session, url=url)
    for id in range(20):
        await asyncio.to_thread(ask, process, id)
    process.kill()  # what a client saw end is kept
    _, err = await asyncio.to_thread(process.communicate)
    assert b"serving goes on, and what is captured waits in" in err
    spools = tmp_path / "spool" / "millrace" / "intake"
    assert len(list(spools.iterdir())) == 1
    async with recorded(tmp_path / "gateway", port) as w:
        process = through(tmp_path, *echo_server(), session=session, url=url)
        await asyncio.to_thread(ask, process, 20)
        await until(lambda: len([1 for _, result in pairs(w.events()) if result]) == 21)
        await asyncio.to_thread(process.communicate, timeout=120)
        assert process.returncode == 0
        await until(lambda: not list(spools.iterdir()))


async def test_a_gateway_that_is_killed_and_comes_back_has_each_event_once(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    process = session = None
    asked = 0
    for _ in range(3):
        async with recorded(tmp_path / "gateway", port) as w:
            session = session or await w.start()
            process = process or through(tmp_path, *echo_server(), session=session, url=f"{w.url}/v1")
            for _ in range(5):
                await asyncio.to_thread(ask, process, asked := asked + 1)
            await until(lambda: len(pairs(w.events())) >= 5)
        await asyncio.to_thread(ask, process, asked := asked + 1)
    async with recorded(tmp_path / "gateway", port) as w:
        await until(lambda: len([1 for _, result in pairs(w.events()) if result]) == asked)
        await asyncio.to_thread(process.communicate, timeout=120)
        ids = [json.loads(result["content"])["content"][0] for _, result in pairs(w.events()) if result]
        assert ids == list(range(1, asked + 1))


async def test_an_episode_that_is_over_takes_no_more_and_says_so(tmp_path: Path) -> None:
    async with recorded(tmp_path / "gateway") as w:
        session = await w.start()
        headers = {"authorization": f"Bearer {session['api_key']}"}
        assert (await w.http.post(f"/v1/sessions/{session['session']}/end", json={}, headers=headers)).is_success
        process = through(tmp_path, *echo_server(), session=session, url=f"{w.url}/v1")
        await asyncio.to_thread(ask, process, 1)
        _, err = await asyncio.to_thread(process.communicate, timeout=120)
        assert b"captured events are lost: the gateway refused them" in err
        assert pairs(w.events()) == []


def test_a_spool_that_cannot_be_made_costs_the_capture_alone(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("no folder")
    process = through(tmp_path, *echo_server(), session=KEY, url=AWAY)
    ask(process, 1)
    _, err = process.communicate(timeout=120)
    assert b"nothing is captured, since there is no spool" in err
    assert process.returncode == 0
