"""Tools that report themselves: what is said of any call, that the tool never notices, and what reaches a gateway."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millrace
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.process.net import free_ports
from millrace.producers.client import AsyncSession, Session
from millrace.producers.intake.conversation import Owner
from millrace.producers.reports import REPORTS
from millrace.producers.tools import arguments, as_json, as_text, current, enter, leave, status
from tests.producers.gateway.sessions.test_tool_asks import ASK, TOOLS, asking, engine
from tests.support import chat_tokenizer, logged
from tests.support.gateway_world import World, world
from tests.support.mcp_captured import environment, pairs, recorded, until

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    REPORTS.close(0)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path_factory.mktemp("chat"))))


def four(a: Any, b: Any, c: Any = None, d: Any = "left alone") -> None: ...


@settings(max_examples=50)
@given(JSON, JSON, st.lists(JSON, max_size=2), st.integers(0, 4))
def test_arguments_are_what_was_given_whichever_way(a: Any, b: Any, rest: list[Any], positional: int) -> None:
    said = dict(zip("abcd", [a, b, *rest], strict=False))
    names = list(said)[:positional]
    named = {name: value for name, value in said.items() if name not in names}
    found = arguments(inspect.signature(four), [said[name] for name in names], named)
    assert found == said
    assert json.loads(as_json(found)) == json.loads(json.dumps(said, default=repr))


def test_arguments_without_a_name_or_a_place_are_kept() -> None:
    def open_ended(a: int, *more: int, **named: int) -> None: ...

    assert arguments(inspect.signature(open_ended), [1, 2], {"x": 3}) == {"a": 1, "more": (2,), "x": 3}
    assert arguments(inspect.signature(four), [1], {"x": 3}) == {"args": [1], "x": 3}
    assert arguments(None, [1], {}) == {"args": [1]}


class Point(pydantic.BaseModel):
    x: float
    y: float = 0


@dataclass
class Pair:
    left: int
    right: int


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("as it is", "as it is"),
        ("\ud800", "?"),
        (None, "null"),
        (7.0, "7.0"),
        (Point(x=1), '{"x":1.0}'),
        (Pair(1, 2), '{"left":1,"right":2}'),
        ({2, 1}, "[1,2]"),
        (b"raw", "\"b'raw'\""),
        ({1: [2**80]}, '{"1": [1208925819614629174706176]}'),
    ],
)
def test_any_result_is_text(value: Any, said: str) -> None:
    assert as_text(value) == said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "ok"),
        (ValueError(), "error"),
        (TimeoutError(), "timeout"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
    ],
)
def test_how_a_call_ended(error: BaseException | None, said: str) -> None:
    assert status(error) == said


def test_a_tool_is_the_function_that_it_was() -> None:
    @millrace.tool
    def plain(a: Annotated[int, "the first"], b: int = 2) -> int:
        """What it does."""
        return a + b

    @millrace.tool(version="2")
    async def later(a: int) -> int:
        return a

    assert (plain.__name__, plain.__doc__, plain(1), plain(b=3, a=1)) == ("plain", "What it does.", 3, 4)
    assert str(inspect.signature(plain)) == "(a: \"Annotated[int, 'the first']\", b: 'int' = 2) -> 'int'"
    assert inspect.iscoroutinefunction(later)
    assert not inspect.iscoroutinefunction(plain)
    assert asyncio.run(later(5)) == 5


def test_what_is_no_plain_function_is_refused() -> None:
    def several() -> Iterator[int]:
        yield 1

    for bad in (several, 7, Point, int):
        with pytest.raises(TypeError, match="cannot be a tool"):
            millrace.tool(bad)  # type: ignore[call-overload]  # that is the point


class Methods:
    @millrace.tool
    @staticmethod
    def plain_above(n: int) -> int:
        return n + 1

    @staticmethod
    @millrace.tool
    def plain_below(n: int) -> int:
        return n + 1

    @millrace.tool(version="2")
    @classmethod
    def of_class_above(cls, n: int) -> int:
        return n + (cls is Methods)

    @classmethod
    @millrace.tool
    def of_class_below(cls, n: int) -> int:
        return n + (cls is Methods)

    @millrace.tool
    def of_instance(self, n: int) -> int:
        return n + isinstance(self, Methods)


def test_methods_of_every_kind_are_what_they_were() -> None:
    names = ("plain_above", "plain_below", "of_class_above", "of_class_below")
    assert [getattr(where, name)(3) for where in (Methods, Methods()) for name in names] == [4] * 8
    assert Methods().of_instance(3) == 4


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.usefixtures("_spool")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_tool_never_notices(data: st.DataObject) -> None:
    """No gateway listens there, and values may refuse to be written down."""
    outcome = data.draw(st.sampled_from([7, None, "text", Unspeakable(), ValueError("its own"), KeyboardInterrupt()]))

    def act(value: Any) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def act_later(value: Any) -> Any:
        return act(value)

    def run(function: Any) -> Any:
        try:
            found = function(data.draw(st.sampled_from([1, Unspeakable()])))
            return asyncio.run(found) if inspect.iscoroutine(found) else found
        except BaseException as error:
            return error

    session = Session.attach("http://127.0.0.1:1/v1", "mr-away.key")
    lost = session.lost
    for function in (act, act_later, lambda value: act_later(value)):
        with session.active():
            assert run(millrace.tool(function)) is outcome
        assert run(session.tool(function)) is outcome
        assert current.get() is None
    assert session.lost - lost <= 6


@pytest.mark.usefixtures("_spool")
def test_a_tool_goes_on_without_a_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    session = Session.attach("http://127.0.0.1:1/v1", "mr-away.key")
    add = session.tool(lambda a, b: a + b)
    with caplog.at_level(logging.WARNING, "millrace.producers.reports"):
        assert [add(1, 2), add(3, 4)] == [3, 7]
    assert session.lost == 4
    assert len(logged.lines(caplog, "millrace.producers.reports")) == 1


def add(a: float, b: float) -> float:
    return a + b


async def told(w: World, count: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Calls and results, once there are so many."""
    await until(lambda: sum(result is not None for _, result in pairs(w.events())) >= count)
    found = [(call, result) for call, result in pairs(w.events()) if result is not None]
    assert len(found) == count
    return found


@pytest.mark.usefixtures("_spool")
async def test_calls_are_in_the_episode_before_it_ends(tmp_path: Path) -> None:
    """From plain code, tasks, a pool that copies the context, and a bare thread."""
    plain, later = millrace.tool(add), millrace.tool(name="slow", version="3", side_effect="reversible")

    @later
    async def slow(n: int, ctx: Any = None) -> str:
        await asyncio.sleep(0)
        if n == 3:
            raise TimeoutError("too long")
        return f"n is {n}"

    def work(url: str) -> str:
        with Session.start(url) as session:
            plain(3, b=4)
            with ThreadPoolExecutor(2) as pool:
                for n in range(4):
                    pool.submit(contextvars.copy_context().run, plain, n, n)
            thread = threading.Thread(target=session.tool(add), args=(10, 20))
            thread.start()
            thread.join()
        plain(5, 6)  # in nobody's episode
        return session.id

    async with recorded(tmp_path / "gateway") as w:
        id = await asyncio.to_thread(work, f"{w.url}/v1")
        events = w.events(id)
        assert [event["kind"] for event in events if event["kind"].startswith("episode")][-1] == "episode_ended"
        assert events[-1]["kind"] == "episode_ended"
        done = pairs(events)
        assert sorted(result["content"] for _, result in done if result) == ["0", "2", "30", "4", "6", "7"]
        assert {call["join"] for call, _ in done} == {"absent"}
        async with await AsyncSession.start(f"{w.url}/v1") as session:
            ran = await asyncio.gather(*(slow(n) for n in range(4)), return_exceptions=True)
            assert [str(one) for one in ran] == ["n is 0", "n is 1", "n is 2", "too long"]
        results = [result for _, result in pairs(w.events(session.id)) if result]
        assert {result["status"] for result in results if "too long" in result["content"]} == {"timeout"}
        told_of = {(result["name"], result["tool_version"], result["side_effect"]) for result in results}
        assert told_of == {("slow", "3", "reversible")}
        assert len(results) == 4
        assert session.lost == 0


@pytest.mark.usefixtures("_spool")
async def test_sessions_in_tasks_do_not_meet(tmp_path: Path) -> None:
    tool = millrace.tool(add)

    async def agent(url: str, n: int) -> str:
        async with await AsyncSession.start(url) as session:
            await asyncio.sleep(0)
            tool(n, 0)
        return session.id

    async with recorded(tmp_path / "gateway") as w:
        ids = await asyncio.gather(*(agent(f"{w.url}/v1", n) for n in range(5)))
        for n, id in enumerate(ids):
            ((call, result),) = pairs(w.events(id))
            assert (json.loads(call["arguments"]), result and result["content"]) == ({"a": n, "b": 0}, str(n))


@pytest.mark.usefixtures("_spool")
async def test_a_call_is_joined_to_what_the_model_asked(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path / "gateway", renderer, engine(renderer, asking("add"), asking("calc__add"))) as w:
        async with await AsyncSession.start(f"{w.url}/v1") as session:
            answer = (await w.chat([ASK], session.api_key, tools=TOOLS)).json()
            (asked,) = answer["choices"][0]["message"]["tool_calls"]
            millrace.tool(add)(**json.loads(asked["function"]["arguments"]))

            @millrace.tool(name="calc__add", call_id="tool_call_id", leave_out=["context"])
            def add_by_id(a: float, b: float, context: Any, tool_call_id: str) -> float:
                return a + b

            add_by_id(1, 2, Unspeakable(), "call_7")
        (joined, _), (named, _) = pairs(w.events(session.id))
        assert (joined["join"], joined["asked_id"], joined["response_id"]) == ("unique", asked["id"], answer["id"])
        assert (named["join"], named["call_id"], json.loads(named["arguments"])) == (None, "call_7", {"a": 1, "b": 2})


@pytest.mark.usefixtures("_spool")
async def test_a_gateway_that_is_away_gets_every_call_once_it_is_back(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with recorded(tmp_path / "gateway", port) as w:
        session = await AsyncSession.start(f"{w.url}/v1")
        session.tool(add)(0, 0)
        await told(w, 1)
    for n in range(1, 6):
        session.tool(add)(n, n)
    async with recorded(tmp_path / "gateway", port) as w:
        found = await told(w, 6)
        assert [result["content"] for _, result in found] == ["0", "2", "4", "6", "8", "10"]
        await session.close()
    assert session.lost == 0


@pytest.mark.usefixtures("_spool")
async def test_what_is_lost_is_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with recorded(tmp_path / "gateway") as w:
        session = await AsyncSession.start(f"{w.url}/v1")
        await session.end()
        with caplog.at_level(logging.WARNING, "millrace.producers.reports"):
            for n in range(3):
                session.tool(add)(n, n)
                await session.close()
        assert session.lost == 6
        lines = logged.lines(caplog, "millrace.producers.reports")
        assert [line for line in lines if "lost" in line] == lines[:1]


FORKED = """
import os, sys
from millrace import Session
from millrace.producers.reports import REPORTS

session = Session.attach(*sys.argv[1:])
add = session.tool(lambda a, b: a + b)
add(0, 0)
child = os.fork()
for n in range(1, 4):
    add(n, n if child else -n)
if not child:
    REPORTS.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
async def test_a_forked_child_reports_its_own(tmp_path: Path) -> None:
    async with recorded(tmp_path / "gateway") as w:
        session = await w.start()
        command = [sys.executable, "-c", FORKED, f"{w.url}/v1", session["api_key"]]
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=120, env=environment(tmp_path))
        found = await told(w, 7)
        assert sorted(int(result["content"]) for _, result in found) == [0, 0, 0, 0, 2, 4, 6]


WORKERS = """
import functools, multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor

import millrace
from millrace.producers.reports import Reports

Reports.close.__defaults__ = (100.0,)  # however slow this machine is

def work(place, n):
    with millrace.Session.attach(*place).active():
        millrace.tool(name="add")(lambda a, b: a + b)(n, n)

if __name__ == "__main__":
    place = sys.argv[1:]
    with millrace.Session.attach(*place).active():
        millrace.tool(name="add")(lambda a, b: a + b)(0, 0)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(place, n)) for n in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    with ProcessPoolExecutor(1, context) as pool:
        assert list(pool.map(functools.partial(work, place), (3, 4))) == [None, None]
"""


@pytest.mark.slow
async def test_workers_of_a_pool_report_before_they_end(tmp_path: Path) -> None:
    """What they keep lies in spools of their own, which nobody else sends soon."""
    async with recorded(tmp_path / "gateway") as w:
        session = await w.start()
        command = [sys.executable, "-c", WORKERS, f"{w.url}/v1", session["api_key"]]
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=120, env=environment(tmp_path))
        results = [result["content"] for _, result in pairs(w.events()) if result]
        assert sorted(map(int, results)) == [0, 2, 4, 6, 8]


BLOCKS = st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12)


@given(BLOCKS, BLOCKS)
def test_each_context_is_in_the_block_that_it_entered_last(mine: list[tuple[int, bool]], other: Any) -> None:
    """Whatever other contexts enter and leave with the same sessions, and in whatever order blocks end."""
    marks = [object() for _ in range(3)]

    def owner(n: int) -> Owner:
        return Owner(f"mr-{n}.key", "http://127.0.0.1:1/v1")

    def steps(moves: list[tuple[int, bool]]) -> Iterator[None]:
        inside: list[int] = []
        for n, enters in moves:
            if enters:
                enter(marks[n], owner(n))
                inside.append(n)
            else:
                leave(marks[n])
                for at in reversed(range(len(inside))):
                    if inside[at] == n:
                        del inside[at]
                        break
            assert current.get() == (owner(inside[-1]) if inside else None)
            yield

    runs = [(contextvars.Context(), steps(moves)) for moves in (mine, other)]
    for _ in range(max(map(len, (mine, other)))):
        for context, run in runs:
            context.run(next, run, None)


@pytest.mark.usefixtures("_spool")
def test_threads_that_share_a_session_leave_it_for_their_own_episodes() -> None:
    shared, own = (Session.attach("http://127.0.0.1:1/v1", f"mr-{name}.key") for name in ("shared", "own"))
    entered, both, left = threading.Event(), threading.Event(), threading.Event()
    found: dict[str, Owner | None] = {}

    def bare() -> None:
        with shared:
            entered.set()
            both.wait(60)
        found["bare"] = current.get()
        left.set()

    def inside() -> None:
        entered.wait(60)
        with own.active():
            with shared:
                both.set()
                left.wait(60)
            found["inside"] = current.get()

    threads = [threading.Thread(target=one) for one in (bare, inside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"bare": None, "inside": Owner("mr-own.key", "http://127.0.0.1:1/v1")}


def test_the_owner_of_a_session_is_its_key_and_its_gateway() -> None:
    session = Session.attach("http://127.0.0.1:1/v1/", "mr-a.b")
    with session.active():
        assert current.get() == Owner("mr-a.b", "http://127.0.0.1:1/v1")
