"""An upstream of chat completions as a process to kill; its arguments are PORT, PIECES, PAUSE_S.

Each stream says its pieces with pauses between them; the last of them is `end`, so that who has it has all."""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web

from millrace.infra.process.net import LOCALHOST


def app(pieces: int, pause_s: float) -> web.Application:
    """`POST /v1/chat/completions`, streamed."""

    async def chat(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for at in range(pieces):
            last = at == pieces - 1
            choice = {
                "index": 0,
                "delta": {"content": "end" if last else f"{at} "},
                "finish_reason": "stop" if last else None,
            }
            event = {"id": f"c-{id(answer)}", "object": "chat.completion.chunk", "choices": [choice]}
            await answer.write(b"data: %s\n\n" % json.dumps(event).encode())
            await asyncio.sleep(pause_s)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    made = web.Application()
    made.add_routes([web.post("/v1/chat/completions", chat)])
    return made


if __name__ == "__main__":
    web.run_app(app(int(sys.argv[2]), float(sys.argv[3])), host=LOCALHOST, port=int(sys.argv[1]), print=None)
