"""An engine over HTTP that answers at once: vLLM's generate route with scripted tokens, for processes under test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from millrace.infra.process.net import free_ports


@dataclass
class InstantEngine:
    """`script` gives the tokens after a prompt; `label` is stamped on them; `asked` holds the requests."""

    script: Callable[[list[int]], list[int]]
    label: str = "policy@0"
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`POST /inference/v1/generate`, plain and streamed."""
        body = await request.json()
        self.asked.append(body)
        ids = self.script(body["token_ids"])
        content = [{"token_id": id, "logprob": -0.25 - id / 1000, "rank": 1} for id in ids]
        spans = [{"version": self.label, "start": 0, "end": len(ids)}]
        choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}}
        usage = {"prompt_tokens": len(body["token_ids"]), "completion_tokens": len(ids)}
        choices = [{**choice, "weight_versions": spans}]
        if not body.get("stream"):
            return web.json_response({"choices": choices, "usage": usage})
        events = [json.dumps({"choices": choices}), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
        return web.Response(text="".join(f"data: {one}\n\n" for one in events), content_type="text/event-stream")


@asynccontextmanager
async def serving(engine: InstantEngine) -> AsyncIterator[InstantEngine]:
    """The engine on a free port."""
    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", engine.generate)])
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engine.url = f"http://127.0.0.1:{port}"
    try:
        yield engine
    finally:
        await runner.cleanup()
