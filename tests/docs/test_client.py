"""docs/client.md, typed as it stands before a real gateway with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.producers.client import AsyncSession
from millrace.producers.reports import REPORTS
from tests.producers.gateway.sessions.test_tool_asks import asking, engine
from tests.support import chat_tokenizer
from tests.support.documents import ROOT, blocks
from tests.support.gateway_world import world
from tests.support.mcp_captured import pairs, recorded

CALLS, TASKS, IDS = [block.text for block in blocks(ROOT / "docs" / "client.md") if block.language == "python"]


@pytest.fixture(autouse=True)
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    REPORTS.close(0)


def names(program: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(program, found)
    return found


async def test_an_agent_reports_its_tools(tmp_path: Path) -> None:
    renderer = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path / "chat")))
    async with world(tmp_path / "gateway", renderer, engine(renderer, asking("add"), "It is 7.")) as w:
        answer = names(CALLS)["answer"]
        assert await asyncio.to_thread(answer, f"{w.url}/v1", "x", "What is 3 + 4?") == "It is 7."
        ((call, result),) = pairs(w.events())
        assert (call["name"], call["join"], result and result["content"]) == ("add", "unique", "7")


async def test_tasks_and_threads_report(tmp_path: Path) -> None:
    async with recorded(tmp_path / "gateway") as w:
        assert await names(TASKS)["research"](f"{w.url}/v1", "x") == ["the page at a", "the page at b"]
        said = sorted((call["name"], json.loads(call["arguments"]).popitem()[1]) for call, _ in pairs(w.events()))
        assert said == [("fetch_page", "a"), ("fetch_page", "b"), ("write_down", "begun")]


async def test_the_id_of_the_model_is_taken(tmp_path: Path) -> None:
    async with recorded(tmp_path / "gateway") as w:
        async with await AsyncSession.start(f"{w.url}/v1") as session:
            with session.active():
                assert names(IDS)["lookup"]("Rome", object(), tool_call_id="call_1") == "sunny in Rome"
        ((call, _),) = pairs(w.events())
        assert (call["call_id"], call["join"], call["arguments"]) == ("call_1", None, '{"city":"Rome"}')
