"""What the scripted model says to two questions with tools, and the gateway before it that programs meet.

Invariant: a reply follows from its prompt alone, so a retry and a call more or less change nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.producers.gateway.rendering.template import TemplateRenderer
from millrace.producers.gateway.rendering.tokenizer import ChatTokenizer
from tests.support import chat_tokenizer
from tests.support.gateway_world import ScriptedEngine, World, world

SECOND = "Now multiply both sums."
"""by which the second question is known"""
FIRST_ANSWER, LAST_ANSWER = "The sums are 7 and 11.", "The product is 77."
CALLS = [["add", 3.0, 4.0], ["add", 5.0, 6.0], ["multiply", 7.0, 11.0]]
SKIPPED = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}
Flavour = Callable[[str], str]


def step(prompt: str) -> str:
    """Where the conversation of this prompt stands: ask, answer, ask_again, answer_again; idle without a question."""
    if SECOND in prompt:
        return "answer_again" if "product=77" in prompt else "ask_again"
    if "3 + 4" not in prompt:
        return "idle"
    return "answer" if "sum=7" in prompt and "sum=11" in prompt else "ask"


def native(prompt: str) -> str:
    """The reply of a model that calls tools by their names and then answers."""
    thought = "<think>\nLet me see.\n</think>\n\n"
    if step(prompt) == "ask" and '"ToolSearch"' in prompt and _name(prompt, "add") == "add":
        return thought + _call("ToolSearch", {"query": "select:mcp__calc__add,mcp__calc__multiply", "max_results": 2})
    said = {
        "ask": lambda: "Let me check.\n" + _calls(prompt, *CALLS[:2]),
        "ask_again": lambda: _calls(prompt, CALLS[2]),
        "answer": lambda: FIRST_ANSWER,
        "answer_again": lambda: LAST_ANSWER,
        "idle": lambda: "Ready.",
    }
    return thought + said[step(prompt)]()


def final_answer(prompt: str) -> str:
    """The same for a framework whose agents answer by a tool."""
    said = {"answer": FIRST_ANSWER, "answer_again": LAST_ANSWER}.get(step(prompt))
    return native(prompt) if said is None else _call("final_answer", {"answer": said})


def fields(prompt: str) -> str:
    """The same for DSPy, which asks for fields instead of tools; one call at a time."""
    asked = prompt.rpartition("[[ ## question ## ]]")[2]
    if "[[ ## next_tool_name ## ]]" not in prompt:
        said = LAST_ANSWER if SECOND in asked else FIRST_ANSWER
        return f"[[ ## reasoning ## ]]\nAs seen.\n\n[[ ## answer ## ]]\n{said}\n\n[[ ## completed ## ]]"
    wanted = CALLS[2:] if SECOND in asked else CALLS[:2]
    seen = [f"product={a * b:g}" if name == "multiply" else f"sum={a + b:g}" for name, a, b in wanted]
    left = [call for call, mark in zip(wanted, seen, strict=True) if mark not in asked]
    name, arguments = (left[0][0], {"a": left[0][1], "b": left[0][2]}) if left else ("finish", {})
    shown = {"next_thought": "On.", "next_tool_name": name, "next_tool_args": json.dumps(arguments)}
    return "\n\n".join([f"[[ ## {key} ## ]]\n{said}" for key, said in shown.items()] + ["[[ ## completed ## ]]"])


def _calls(prompt: str, *calls: list) -> str:  # type: ignore[type-arg]  # a name and two numbers
    return "\n".join(_call(_name(prompt, name), {"a": a, "b": b}) for name, a, b in calls)


def _name(prompt: str, name: str) -> str:
    """What a tool is called there: frameworks put a server's name before it."""
    found = re.search(rf'"name": "([\w.-]*{name})"', prompt)
    return found.group(1) if found else name


def _call(name: str, arguments: dict[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class Exchange:
    """One request that passed the witness, and its answer."""

    method: str
    path: str
    status: int
    asked: bytes
    said: bytes
    streamed: bool


@dataclass
class Witness:
    """A proxy before the gateway that keeps what passes."""

    target: str
    seen: list[Exchange] = field(default_factory=list)

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Hand a request to the gateway, and its answer back as it comes."""
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in SKIPPED}
        async with self._http.request(
            request.method, f"{self.target}{request.raw_path}", data=body, headers=headers
        ) as answer:
            kind = answer.headers.get("content-type", "")
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in SKIPPED}
            out = web.StreamResponse(status=answer.status, headers=kept)
            await out.prepare(request)
            said = b""
            async for part in answer.content.iter_any():
                said += part
                await out.write(part)
            streamed = "event-stream" in kind
            self.seen.append(Exchange(request.method, request.path, answer.status, body, said, streamed))
            return out

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its URL."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self.pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(runner, LOCALHOST, port).start()
        async with aiohttp.ClientSession(auto_decompress=False) as self._http:
            try:
                yield f"http://{LOCALHOST}:{port}"
            finally:
                await runner.cleanup()


@asynccontextmanager
async def stage(folder: Path, flavour: Flavour) -> AsyncIterator[tuple[World, Witness, str]]:
    """A gateway before the scripted model, a witness before the gateway, and the witness's URL."""
    tokenizer = ChatTokenizer(chat_tokenizer.write(folder / "chat"))
    engine = ScriptedEngine(lambda prompt, *_: tokenizer.encode(flavour(tokenizer.decode(prompt)) + "<|im_end|>"))
    async with world(folder, TemplateRenderer(tokenizer), engine, max_model_len=200_000) as w:
        w.acknowledge(0)
        witness = Witness(w.url)
        async with witness.serving() as url:
            yield w, witness, url
