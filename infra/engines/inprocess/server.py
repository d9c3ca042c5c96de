"""The in-process engine as a server of its own that speaks vLLM's wire subset, so that the same gateway and the same
reloader work with it: `python -m millrace.infra.engines.inprocess.server --model DIR --port P`.

Routes: POST /inference/v1/generate (plain and streamed), /pause, /resume, /abort_requests, /collective_rpc
(reload_weights alone), /update_weight_version, /reset_prefix_cache; GET /health, /is_paused, /weight_info, /version,
/metrics (the start time alone), /v1/models. With `--receiver MODULE:FUNCTION` also those by which vLLM takes weights
from a process group: GET /get_world_size; POST /init_weight_transfer_engine, /start_weight_update, /update_weights,
/finish_weight_update. One process; it ends when its sampling thread does."""

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

from millrace.infra.config import is_local
from millrace.infra.engines.base import Chunk
from millrace.infra.engines.inprocess.engine import PAUSE_MODES, InprocessEngine
from millrace.infra.engines.inprocess.wire import (
    Abort,
    GenerateBody,
    InitTransfer,
    NewVersion,
    Rpc,
    Update,
    choice,
    counted,
    sampling,
)
from millrace.infra.engines.keyed import KEY, Keyed
from millrace.infra.errors import EngineError, EngineRejected, EngineUnavailable
from millrace.infra.process.ending import end
from millrace.infra.process.stopping import stop_asked

VERSION = "inprocess-1"

Receiver = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, torch.Tensor]]
"""(init_info, update_info) -> the tensors that came, checked; raises when they do not come"""


_body = msgspec.json.Decoder(GenerateBody)
_rpc = msgspec.json.Decoder(Rpc)
_new_version = msgspec.json.Decoder(NewVersion)
_abort = msgspec.json.Decoder(Abort)
_group = msgspec.json.Decoder(InitTransfer)
_update = msgspec.json.Decoder(Update)


def build_app(engine: InprocessEngine, name: str, receiver: Receiver | None = None) -> Starlette:
    """The application that serves `engine` under the model name `name`. `receiver` gets weights from a group."""
    started = time.time()
    changing = asyncio.Lock()  # as in vLLM, what was asked first changes the weights first
    named: list[Mapping[str, Any]] = []

    async def generate(request: Request) -> Response:
        body = _body.decode(await request.body())
        if body.model not in (None, name):
            raise EngineRejected(f"The model `{body.model}` does not exist. Valid aliases: {name}.", 404)
        wanted = sampling(body.sampling_params)
        chunks = engine.generate(body.token_ids, wanted, request_id=body.request_id, stream=body.stream)
        if not body.stream:
            return await _until_disconnect(request, _whole(chunks, body))
        first = await anext(chunks)  # a refusal must be a status, not an event
        return StreamingResponse(_events(first, chunks, body), media_type="text/event-stream")

    async def pause(request: Request) -> Response:
        asked = request.query_params.get("mode", "abort")
        mode = next((mode for mode in PAUSE_MODES if mode == asked), None)
        if mode is None:
            raise EngineRejected(f"mode must be one of {', '.join(PAUSE_MODES)}, not {asked}", 400)
        await engine.pause(mode)
        return _json({"status": "paused"})

    async def resume(request: Request) -> Response:
        await engine.resume()
        return _json({"status": "resumed"})

    async def collective_rpc(request: Request) -> Response:
        call = _rpc.decode(await request.body())
        if call.method != "reload_weights" or "weights_path" not in call.kwargs:
            raise EngineRejected("only reload_weights with a weights_path is known here", 400)
        async with changing:
            await engine.load(call.kwargs["weights_path"])
        return _json({"results": [None]})

    async def world_size(request: Request) -> Response:
        return _json({"world_size": 1})

    async def init_weight_transfer_engine(request: Request) -> Response:
        group = _group.decode(await request.body()).init_info
        async with changing:
            named[:] = [group]
        return _json({"message": "Weight transfer initialized"})

    async def start_weight_update(request: Request) -> Response:
        return _json({"message": "Weight update started"})

    async def update_weights(request: Request) -> Response:
        announced = _update.decode(await request.body()).update_info
        assert receiver is not None, "there is no such route"
        async with changing:
            if not named:
                raise EngineRejected(
                    "no group was named for this update: /init_weight_transfer_engine comes first", 400
                )
            try:
                tensors = await asyncio.to_thread(receiver, named.pop(), announced)
            except Exception as error:  # whatever it raises, the weights are as they were
                raise EngineError(f"the weights did not come: {error}") from error
            await engine.put(tensors)
        return _json({"message": "Weights updated"})

    async def finish_weight_update(request: Request) -> Response:
        return _json({"message": "Weight update finished"})

    async def update_weight_version(request: Request) -> Response:
        version = _new_version.decode(await request.body()).new_version
        await engine.set_version(version)
        return _json({"success": True, "new_version": version})

    async def reset_prefix_cache(request: Request) -> Response:
        running = request.query_params.get("reset_running_requests", "false") == "true"
        return _json({"success": await engine.reset_prefix_cache(running)})

    async def abort(request: Request) -> Response:
        ids = [one.removeprefix("generate-tokens-") for one in _abort.decode(await request.body()).request_ids]
        return _json({"status": "aborted", "aborted": await engine.abort(ids)})

    async def health(request: Request) -> Response:
        return Response(status_code=200 if await engine.health() else 503)

    async def is_paused(request: Request) -> Response:
        return _json({"is_paused": engine.paused})

    async def weight_info(request: Request) -> Response:
        return _json({"weight_version": await engine.weight_version()})

    async def version(request: Request) -> Response:
        return _json({"version": VERSION})

    async def metrics(request: Request) -> Response:
        return Response(f"process_start_time_seconds {started!r}\n", media_type="text/plain")

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [{"id": name, "object": "model", "max_model_len": engine.context}]})

    posts: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/inference/v1/generate", generate),
        ("/pause", pause),
        ("/resume", resume),
        ("/collective_rpc", collective_rpc),
        ("/update_weight_version", update_weight_version),
        ("/reset_prefix_cache", reset_prefix_cache),
        ("/abort_requests", abort),
    ]
    gets: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/health", health),
        ("/is_paused", is_paused),
        ("/weight_info", weight_info),
        ("/version", version),
        ("/metrics", metrics),
        ("/v1/models", models),
    ]
    if receiver is not None:
        posts += [
            ("/init_weight_transfer_engine", init_weight_transfer_engine),
            ("/start_weight_update", start_weight_update),
            ("/update_weights", update_weights),
            ("/finish_weight_update", finish_weight_update),
        ]
        gets.append(("/get_world_size", world_size))
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


async def _whole(chunks: AsyncGenerator[Chunk, None], body: GenerateBody) -> Response:
    choices = [chunk async for chunk in chunks]
    message = {"request_id": f"generate-tokens-{body.request_id}", "choices": [choice(one) for one in choices]}
    return _json({**message, "usage": counted(choices[-1])})


async def _events(first: Chunk, rest: AsyncGenerator[Chunk, None], body: GenerateBody) -> AsyncGenerator[bytes, None]:
    request_id = f"generate-tokens-{body.request_id}"
    usage = None
    try:
        chunk: Chunk | None = first
        while chunk is not None:
            usage = counted(chunk)
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

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    working, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=499)
    finally:
        working.cancel()
        leaving.cancel()


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


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
        app = Keyed(app)
    server: Any = Server(app, address=host, port=port, interface=Interfaces.ASGI, log_enabled=False)
    stopping = stop_asked()
    serving = asyncio.create_task(server.serve())
    while not (stopping.is_set() or serving.done() or engine.death):
        try:
            await asyncio.wait_for(stopping.wait(), 0.2)
        except TimeoutError:
            continue
    failed = engine.death is not None or serving.done()
    server.stop()
    await serving
    await engine.close()
    return 1 if failed else 0


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
    given = parser.parse_args()
    if not is_local(given.host) and not os.environ.get(KEY):
        parser.error(f"--host {given.host} is reachable from other machines: set {KEY}")
    torch.set_num_threads(given.threads)
    name, receiver = given.served_model_name, pkgutil.resolve_name(given.receiver) if given.receiver else None
    end(asyncio.run(serve(given.model, given.host, given.port, name, given.max_rows, given.seed, receiver)))


if __name__ == "__main__":
    main()
