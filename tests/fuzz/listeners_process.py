"""Every listener in one process, to be sent anything: `python -m tests.fuzz.listeners_process FOLDER FAR`

A gateway before a scripted engine, a gateway before the upstream FAR, a receiver of OTLP, a proxy of MCP before
FAR/mcp and one of A2A before FAR that capture for a session of the first gateway. Writes one line of JSON, their
addresses and that session, and serves until its standard input ends."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web

from millrace.dialects.all import DIALECTS
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.engines.base import Chunk, Sampling
from millrace.infra.engines.upstream import TextUpstream
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.producers.gateway.upstreams import embeddings
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.producers.intake.a2a_proxy import A2aProxy, Children
from millrace.producers.intake.capture import Capture
from millrace.producers.intake.conversation import Owner
from millrace.producers.intake.mcp_proxy import McpProxy
from millrace.producers.intake.otlp.app import OtlpEndpoint
from millrace.producers.intake.otlp.serve import serve
from millrace.producers.intake.reverse import ReverseProxy
from millrace.producers.intake.spool import Spool
from tests.support import chat_tokenizer
from tests.support.gateway_world import ScriptedEngine, world
from tests.support.otlp_process import made, options

KEYS = {"sk-one": "one", "sk-two": "two"}
BODY_S = 3.0
"""for a body to come in, also on a machine that has other work"""
PAUSE_S = 0.004
"""between two tokens, so that a reply lasts while something bad happens"""


class Unhurried(ScriptedEngine):
    """Takes its time for each token."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, stream: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        self.asked.clear()  # a long run must not grow by what nobody looks at
        async for chunk in super().generate(prompt_ids, sampling, request_id=request_id, stream=stream):
            await asyncio.sleep(PAUSE_S)
            yield chunk


async def main() -> None:
    folder, far = Path(sys.argv[1]), sys.argv[2]
    logging.getLogger("aiohttp.server").setLevel(
        logging.CRITICAL
    )  # it writes a traceback for each request that is no HTTP
    renderer = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(folder / "chat")))
    engine = Unhurried(lambda *_: renderer.tokenizer.encode("The answer is 42. " * 4 + "<|im_end|>"))
    speaks = frozenset({*(dialect.name for dialect in DIALECTS), embeddings.NAME})
    upstream = Upstream("far", TextUpstream(far, "sk-far"), speaks)
    upstreams = Upstreams([upstream], [RouteRule("*", "far", "")], answers_all=True)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(upstreams.close)
        bounds = {"keys": KEYS, "rollout_key": "sk-one", "body_timeout_s": BODY_S}
        gateway = await stack.enter_async_context(world(folder / "gateway", renderer, engine, **bounds))
        door = await stack.enter_async_context(world(folder / "door", None, None, upstream=upstreams, **bounds))
        session = await gateway.start()

        capture = Capture(Spool(folder / "spool"), lambda said: None)
        stack.callback(capture.close, 1.0)
        base_url = f"{gateway.url}/v1"
        owner = Owner(session["api_key"], base_url)
        proxy = McpProxy(f"{far}/mcp", "calc", capture, base_url, owner, lambda said: None)
        mcp = await _proxied(stack, proxy)
        children = Children("sk-one", hands_on=False)
        a2a = await _proxied(
            stack, A2aProxy(far, "far", capture, base_url, owner, lambda said: None, children=children)
        )

        receiver, stop, (port,) = made(folder / "otlp", 3600), asyncio.Event(), free_ports(1)
        receiving = asyncio.create_task(serve(OtlpEndpoint(receiver, options()), LOCALHOST, port, stop))
        addresses = {
            "gateway": gateway.url,
            "door": door.url,
            "otlp": f"http://{LOCALHOST}:{port}",
            "mcp": mcp,
            "a2a": a2a,
        }
        print(json.dumps({"addresses": addresses, "session": session["session"]}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        stop.set()
        await receiving
        receiver.close()


async def _proxied(stack: AsyncExitStack, proxy: ReverseProxy) -> str:
    """Its address."""
    await proxy.open()
    stack.push_async_callback(proxy.close)
    runner = web.ServerRunner(web.Server(proxy.handle, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, LOCALHOST, 0).start()
    return f"http://{LOCALHOST}:{runner.addresses[0][1]}"


if __name__ == "__main__":
    asyncio.run(main())
