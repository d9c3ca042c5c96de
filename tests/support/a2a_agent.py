"""An agent of the A2A SDK that does what a message says, over JSON-RPC (1.0 and 0.3) and HTTP+JSON.

python -m tests.support.a2a_agent PORT"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import MutableMapping
from typing import Any

import uvicorn
from a2a.helpers import proto_helpers as made
from a2a.server.agent_execution.agent_executor import AgentExecutor
from a2a.server.agent_execution.context import RequestContext
from a2a.server.events.event_queue import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes.agent_card_routes import create_agent_card_routes
from a2a.server.routes.jsonrpc_routes import create_jsonrpc_routes
from a2a.server.routes.rest_routes import create_rest_routes
from a2a.server.tasks.inmemory_task_store import InMemoryTaskStore
from a2a.server.tasks.task_updater import TaskUpdater
from a2a.types.a2a_pb2 import AgentCapabilities, AgentCard, AgentInterface
from starlette.applications import Starlette
from starlette.responses import JSONResponse

from millrace.infra.process.net import LOCALHOST

SEEN = ("x-millrace-key", "x-millrace-url", "authorization", "a2a-version")


class Obedient(AgentExecutor):
    """`say X` answers with a message; `work` with a task, two pieces of one artifact and its end; `ask` waits for a
    word, and completes with it; `fail` fails; `hang` works until it is cancelled."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Do it."""
        word = context.get_user_input()
        assert context.message is not None
        if word.startswith("say "):
            await event_queue.enqueue_event(made.new_text_message(word[4:], context_id=context.context_id))
            return
        if context.current_task is None:
            await event_queue.enqueue_event(made.new_task_from_user_message(context.message))
        assert context.task_id is not None
        assert context.context_id is not None
        task = TaskUpdater(event_queue, context.task_id, context.context_id)
        await task.start_work()
        if word == "ask":
            await task.requires_input(task.new_agent_message([made.new_text_part("which?")]))
        elif word == "fail":
            await task.failed(task.new_agent_message([made.new_text_part("no luck")]))
        elif word == "hang":
            await asyncio.Event().wait()
        else:
            parts = [made.new_text_part(part) for part in ("one ", word)]
            await task.add_artifact(parts[:1], artifact_id="a", last_chunk=False)
            await task.add_artifact(parts[1:], artifact_id="a", append=True, last_chunk=True)
            await task.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Stop it."""
        assert context.task_id is not None
        assert context.context_id is not None
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


class Headers:
    """Keeps those that each request came with; `GET /seen` gives them, and begins anew."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._seen: list[dict[str, str]] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        if scope["path"] == "/seen":
            seen, self._seen = self._seen, []
            await JSONResponse(seen)(scope, receive, send)
            return
        named = {name.decode(): value.decode() for name, value in scope["headers"]}
        self._seen.append({name: named[name] for name in SEEN if name in named})
        await self._app(scope, receive, send)


def main(port: int) -> None:
    """Serve until SIGTERM."""
    interfaces = [("JSONRPC", "/rpc", "1.0"), ("HTTP+JSON", "", "1.0"), ("JSONRPC", "/rpc", "0.3"), ("GRPC", "", "1.0")]
    card = AgentCard(
        name="obedient",
        description="does what it is told",
        version="1",
        capabilities=AgentCapabilities(streaming=True),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        supported_interfaces=[
            AgentInterface(
                url=f"http://localhost:{port}{path}" if kind != "GRPC" else f"{LOCALHOST}:1",
                protocol_binding=kind,
                protocol_version=version,
            )
            for kind, path, version in interfaces
        ],
    )
    handler = DefaultRequestHandler(agent_executor=Obedient(), task_store=InMemoryTaskStore(), agent_card=card)
    routes = [
        *create_agent_card_routes(card),
        *create_jsonrpc_routes(handler, "/rpc", enable_v0_3_compat=True),
        *create_rest_routes(handler),
    ]
    uvicorn.run(Headers(Starlette(routes=routes)), host=LOCALHOST, port=port, log_level="error", lifespan="off")


if __name__ == "__main__":
    main(int(sys.argv[1]))
