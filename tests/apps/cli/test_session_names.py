"""A name that an agent gave its session, where an id is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.apps.cli import ask, trajectory
from millrace.apps.cli.main import app
from millrace.apps.cli.session_names import newest_session
from millrace.consumers.tell.command import TreeAnswer
from millrace.infra.config import Settings, load
from millrace.infra.errors import LookError
from millrace.infra.process.net import free_ports
from millrace.producers.gateway.sessions.ownership import Hints
from tests.support.gateway_world import World, world


def at(w: World) -> Settings:
    host, _, port = w.url.removeprefix("http://").partition(":")
    return load(flags={"gateway.host": host, "gateway.port": port})


async def test_the_gateway_knows_names(tmp_path: Path) -> None:
    async with world(tmp_path, None, None) as w:
        session = w.gateway.sessions.make_session("local", Hints("my-bot", ""), [], 0)
        w.gateway.begin(session)
        assert await asyncio.to_thread(newest_session, at(w), "my-bot") == session.id
        assert await asyncio.to_thread(newest_session, at(w), "another") is None


def test_where_no_gateway_answers_nothing_is_known() -> None:
    (port,) = free_ports(1)
    assert newest_session(load(flags={"gateway.port": str(port)}), "my-bot") is None


@pytest.mark.parametrize("known", [True, False])
def test_why_goes_on_with_the_session_of_a_name(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(settings: Settings, what: str, *, text: bool, width: int | None) -> tuple[str, bool]:
        return f"of {what}", what == "id-1"

    monkeypatch.setattr(ask, "entry", lambda _: explain)
    monkeypatch.setattr(ask, "newest_session", lambda *_: "id-1" if known else None)
    done = CliRunner().invoke(app, ["why", "my-bot"])
    assert (done.exit_code, done.output.strip()) == ((0, "of id-1") if known else (1, "of my-bot"))


@pytest.mark.parametrize("known", [True, False])
def test_a_trajectory_is_shown_by_the_name_of_its_session(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(settings: Settings, what: str, **more: Any) -> TreeAnswer:
        if what != "id-1":
            raise LookError(f"nothing is known of {what!r}")
        return TreeAnswer("a tree", {})

    monkeypatch.setattr(trajectory, "entry", lambda _: show)
    monkeypatch.setattr(trajectory, "newest_session", lambda *_: "id-1" if known else None)
    done = CliRunner().invoke(app, ["trajectory", "my-bot"])
    assert done.exit_code == (0 if known else 1)
    assert ("a tree" in done.output) == known
