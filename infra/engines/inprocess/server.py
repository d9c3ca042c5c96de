"""The in-process engine as a server: `python -m millrace.infra.engines.inprocess.server --model DIR --port P`.

Tokens are asked for as of vLLM (POST /inference/v1/generate, plain and streamed; GET /health, /weight_info, /version,
/v1/models), so that one client serves both. Weights are changed by routes of its own, which `InprocessControl` calls:
GET /state; POST /pause, /resume, /load, /label, /recompute, /abort, and with `--receiver MODULE:FUNCTION` /receive. One
process; it ends when its sampling thread does."""

from __future__ import annotations

import argparse
import asyncio
import os
import pkgutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson
import torch
from granian.constants import Interfaces
from granian.server.embed import Server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from millrace.infra.engines.base import Chunk
from millrace.infra.engines.inprocess.engine import InprocessEngine
from millrace.infra.engines.inprocess.wire import (
    Abort,
    AbortCount,
    GenerateBody,
    Label,
    Load,
    Pause,
    Receive,
    ServerState,
    choice,
    sampling,
    usage_of,
)
from millrace.infra.engines.key_check import KEY, KeyCheck
from millrace.infra.errors import EngineError, EngineRejected, EngineUnavailable
from millrace.infra.process.ending import end, stop_event
from millrace.infra.process.net import is_local

VERSION = "inprocess-1"

Receiver = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, torch.Tensor]]
"""(group, announced) -> the tensors that came, checked; raises when they do not come"""

_body = msgspec.json.Decoder(GenerateBody)
_pause = msgspec.json.Decoder(Pause)
_load = msgspec.json.Decoder(Load)
_label = msgspec.json.Decoder(Label)
_abort = msgspec.json.Decoder(Abort)
_receive = msgspec.json.Decoder(Receive)


def build_app(engine: InprocessEngine, name: str, receiver: Receiver | None = None) -> Starlette:
    """The application that serves `engine` under the model name `name`. `receiver` gets weights from a group."""
    incarnation = f"{time.time():.6f}"
    changing = asyncio.Lock()  # the change that is asked for first is made first

    async def generate(request: Request) -> Response:
        body = _body.decode(await request.body())
        if body.model not in (None, name):
            raise EngineRejected(f"The model `{body.model}` does not exist. Valid aliases: {name}.", 404)
        params = sampling(body.sampling_params)
        chunks = engine.generate(body.token_ids, params, request_id=body.request_id, stream=body.stream)
        if not body.stream:
            return await _until_disconnect(request, _full_reply(chunks, body))
        first = await anext(chunks)  # a refusal must be a status, not an event
        return StreamingResponse(_events(first, chunks, body), media_type="text/event-stream")

    async def state(request: Request) -> Response:
        label = await engine.weight_version()
        return _json(ServerState(incarnation, label, engine.paused, receiver is not None, *engine.occupancy))

    async def pause(request: Request) -> Response:
        await engine.pause(_pause.decode(await request.body()).mode)
        return _json({})

    async def resume(request: Request) -> Response:
        await engine.resume()
        return _json({})

    async def load(request: Request) -> Response:
        folder = _load.decode(await request.body()).folder
        async with changing:
            await engine.load(folder)
        return _json({})

    async def receive(request: Request) -> Response:
        offer = _receive.decode(await request.body())
        assert receiver is not None, "there is no such route"
        async with changing:
            try:
                tensors = await asyncio.to_thread(receiver, offer.group, offer.announced)
            except Exception as error:  # whatever it raises, the weights are as they were
                raise EngineError(f"the weights did not come: {error}") from error
            await engine.put(tensors)
        return _json({})

    async def label(request: Request) -> Response:
        await engine.set_version(_label.decode(await request.body()).label)
        return _json({})

    async def recompute(request: Request) -> Response:
        await engine.reset_prefix_cache(reset_running_requests=True)
        return _json({})

    async def abort(request: Request) -> Response:
        return _json(AbortCount(await engine.abort(_abort.decode(await request.body()).request_ids)))

    async def health(request: Request) -> Response:
        return Response(status_code=200 if await engine.health() else 503)

    async def weight_info(request: Request) -> Response:
        return _json({"weight_version": await engine.weight_version()})

    async def version(request: Request) -> Response:
        return _json({"version": VERSION})

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [{"id": name, "object": "model", "max_model_len": engine.context}]})

    posts: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/inference/v1/generate", generate),
        ("/pause", pause),
        ("/resume", resume),
        ("/load", load),
        ("/label", label),
        ("/recompute", recompute),
        ("/abort", abort),
        *([("/receive", receive)] if receiver is not None else []),
    ]
    gets: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/health", health),
        ("/weight_info", weight_info),
        ("/version", version),
        ("/v1/models", models),
        ("/state", state),
    ]
    return Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets),
        ],
        exception_handlers={
            msgspec.ValidationError: _refuse(400),
            msgspec.DecodeError: _refuse(400),
            EngineError: _refuse(500),
        },
    )


async def _full_reply(chunks: AsyncGenerator[Chunk, None], body: GenerateBody) -> Response:
    choices = [chunk async for chunk in chunks]
    message = {"request_id": f"generate-tokens-{body.request_id}", "choices": [choice(one) for one in choices]}
    return _json({**message, "usage": usage_of(choices[-1])})


async def _events(first: Chunk, rest: AsyncGenerator[Chunk, None], body: GenerateBody) -> AsyncGenerator[bytes, None]:
    request_id = f"generate-tokens-{body.request_id}"
    usage = None
    try:
        chunk: Chunk | None = first
        while chunk is not None:
            usage = usage_of(chunk)
            yield b"data: " + orjson.dumps({"request_id": request_id, "choices": [choice(chunk)]}) + b"\n\n"
            chunk = await anext(rest, None)
        yield b"data: " + orjson.dumps({"request_id": request_id, "choices": [], "usage": usage}) + b"\n\n"
        yield b"data: [DONE]\n\n"
    except EngineUnavailable as error:
        yield b"data: " + orjson.dumps({"error": {"message": str(error), "code": 500}}) + b"\n\n"
    finally:
        await rest.aclose()


async def _until_disconnect(request: Request, answer: Awaitable[Response]) -> Response:
    """The answer, unless the client leaves first: then the work for it is cancelled."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    working, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=499)
    finally:
        working.cancel()
        leaving.cancel()


def _json(value: object, status: int = 200) -> Response:
    content = msgspec.json.encode(value) if isinstance(value, msgspec.Struct) else orjson.dumps(value)
    return Response(content, status_code=status, media_type="application/json")


def _refuse(status: int) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, error: Exception) -> Response:
        code = error.status if isinstance(error, EngineRejected) else status
        return _json({"error": {"message": str(error), "type": type(error).__name__, "code": code}}, code)

    return answer


async def serve(
    model: Path, host: str, port: int, name: str, max_rows: int, seed: int | None, receiver: Receiver | None = None
) -> int:
    """Serve until SIGTERM or SIGINT (0) or until the engine dies (1)."""
    engine = InprocessEngine(model, max_rows=max_rows, seed=seed)
    app: Any = build_app(engine, name, receiver)
    if os.environ.get(KEY):
        app = KeyCheck(app)
    server: Any = Server(app, address=host, port=port, interface=Interfaces.ASGI, log_enabled=False)
    stopping = stop_event()
    serving = asyncio.create_task(server.serve())
    while not (stopping.is_set() or serving.done() or engine.death):
        try:
            await asyncio.wait_for(stopping.wait(), 0.2)
        except TimeoutError:
            continue
    has_failed = engine.death is not None or serving.done()
    server.stop()
    await serving
    await engine.close()
    return 1 if has_failed else 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Serve a small transformers model on the CPU, speaking vLLM's wire.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--host", default="127.0.0.1", help=f"address to listen on; elsewhere only with {KEY} set")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="policy")
    parser.add_argument("--max-rows", type=int, default=64, help="choices sampled at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of one forward pass")
    parser.add_argument("--seed", type=int, help="of requests that bring none; default: fresh entropy")
    parser.add_argument("--receiver", default="", help="module:function that takes weights from a process group")
    options = parser.parse_args()
    if not is_local(options.host) and not os.environ.get(KEY):
        parser.error(f"--host {options.host} is reachable from other machines: set {KEY}")
    torch.set_num_threads(options.threads)
    name, receiver = options.served_model_name, pkgutil.resolve_name(options.receiver) if options.receiver else None
    end(asyncio.run(serve(options.model, options.host, options.port, name, options.max_rows, options.seed, receiver)))


if __name__ == "__main__":
    main()
