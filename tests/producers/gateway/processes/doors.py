"""All processes of a gateway in one, each behind a door of its own, and calls to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.gateway.processes.owner import ProcessLayout, choose_process
from tests.support.gateway_world import ScriptedEngine, World, world

USER = {"role": "user", "content": "What is 3 + 4?"}
MORE = {"role": "user", "content": "And then?"}
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
KEYS = {"sk-a-of-a-tenant": "a", "sk-b-of-another": "b"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def engine_of(renderer: TemplateRenderer) -> ScriptedEngine:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode(engine.says + "<|im_end|>"))
    engine.says = "Seven."
    return engine


@asynccontextmanager
async def processes(
    folder: Path, renderer: TemplateRenderer, count: int = 2, former: tuple[int, ...] = (), **options: Any
) -> AsyncIterator[list[World]]:
    """All processes of a gateway, with those that are retired."""
    engine = engine_of(renderer)
    async with AsyncExitStack() as held:
        most = max((count, *former))
        layouts = [ProcessLayout(index, count, former) for index in range(most)]
        yield [
            await held.enter_async_context(
                world(folder, renderer, engine, layout=layout, patience_s=5.0, **{"keys": KEYS, **options})
            )
            for layout in layouts
        ]


async def post(w: World, path: str, body: Any, key: str = "sk-a-of-a-tenant", **headers: str) -> httpx.Response:
    sent = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return await w.http.post(path, json=body, headers=sent)


async def chat(w: World, messages: Any, key: str = "sk-a-of-a-tenant", **headers: str) -> httpx.Response:
    answer = await post(w, "/v1/chat/completions", {"model": "m", "messages": messages, "tools": TOOLS}, key, **headers)
    assert answer.status_code == 200, answer.text
    return answer


def sessions(both: list[World]) -> dict[str, int]:
    """Calls of each session over the logs of all; a session is in one log."""
    out: dict[str, int] = {}
    for w in both:
        for event in w.events():
            if event["kind"] == "episode_started":
                assert event["trajectory"] not in out
                out[event["trajectory"]] = 0
            if event["kind"] == "model_call":
                out[event["trajectory"]] += 1
    return out


def names_of(index: int, count: int = 2) -> str:
    """A name that this process holds."""
    return next(f"n-{at}" for at in range(100) if choose_process(f"name n-{at}", count) == index)
