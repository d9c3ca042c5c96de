"""A thread that an upstream keeps is in the log what that upstream's model read: whole, in the episode of the message
that it goes on from, or said to be not whole; and what passes is what came."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.dialects.all import read
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.upstream import NOT_WHOLE
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from tests.support.in_process import Far, InProcess, Played
from tests.support.recorded import Recorded

TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
steps = st.lists(st.sampled_from(["create", "continue", "continue", "restart", "forget"]), min_size=2, max_size=8)


class FarThreads:
    """An upstream that keeps threads, and its clients, who say only what is new."""

    def __init__(self) -> None:
        self.messages: dict[str, list[Any]] = {}
        self.bodies: list[bytes] = []

    def answer(self, path: str, body: bytes) -> Played:
        self.bodies.append(body)
        asked = orjson.loads(body)
        former = self.messages.get(asked["thread"].get("previous_message_id"), [])
        id = f"msg_far{len(self.messages)}"
        content = [{"type": "text", "text": f"reply {id}"}]
        self.messages[id] = [*former, *asked["messages"], {"role": "assistant", "content": content}]
        usage = {"input_tokens": 5, "output_tokens": 2}
        message = {"id": id, "type": "message", "role": "assistant", "model": "far", "content": content}
        whole = {**message, "stop_reason": "end_turn", "usage": usage}
        return Played(parts=[orjson.dumps(whole)], headers={"content-type": "application/json"})


def calls_of(gateway: InProcess) -> list[tuple[str, dict[str, Any]]]:
    recorded, out = Recorded(), list[tuple[str, dict[str, Any]]]()
    for kept in gateway.log.read():
        event = codec.decode_as("Event", kept.entry.value)
        body = recorded.body(event)
        if event["kind"] == "model_call":
            out.append((event["trajectory"], body))
    return out


async def play(folder: Path, renderer: TemplateRenderer, steps: list[str]) -> None:
    far, known, episodes = FarThreads(), dict[str, bool](), dict[str, str]()

    def opened() -> InProcess:
        return InProcess(
            folder, renderer, lambda body: Played(500), far=Far([RouteRule("far", "upstream_url")], far.answer)
        )

    gateway, last, forgotten = opened(), "", set[str]()
    for step in ["create", *steps]:
        if step == "restart":
            await gateway.close()
            gateway = opened()
            assert not gateway.sessions.unreadable
            forgotten = {id for id in forgotten if id not in gateway.sessions.replies.stored._kept}
            continue
        if step == "forget":
            gateway.sessions.replies.stored.sweep(now_micros() + 10**15)
            forgotten |= known.keys()
            continue
        said = [{"role": "user", "content": f"question {len(known)}"}]
        body: dict[str, Any] = {"model": "far", "max_tokens": 9, "messages": said}
        if step == "create":
            body |= {"thread": {"type": "create"}, "system": f"system {len(known)}", "tools": TOOLS}
        else:
            body["thread"] = {"type": "continue", "previous_message_id": last}
        is_known = step == "create" or (known[last] and last not in forgotten)
        answer = await gateway.ask("POST", "/v1/messages", orjson.dumps(body))
        assert answer.status == 200, answer
        assert far.bodies[-1] == orjson.dumps(body)
        trajectory, call = calls_of(gateway)[-1]
        id = answer.json["id"]
        assert (call["response_id"], call["opened"] != NOT_WHOLE) == (id, is_known)
        if is_known:
            messages, tools, *_ = read(call["request"], call["response"])
            texts = [message["content"] for message in messages]
            truth = [m["content"] if m["role"] == "user" else m["content"][0]["text"] for m in far.messages[id][:-1]]
            assert texts[0].startswith("system")
            assert texts[1:] == truth
            assert tools
            if step == "continue":
                assert (trajectory, call["identified_by"]) == (episodes[last], "response_id")
        known[id], episodes[id], last = is_known, trajectory, id
    await gateway.close()


@settings(max_examples=40, deadline=None)
@given(steps=steps)
@example(steps=["continue", "continue", "restart", "continue"])
@example(steps=["forget", "continue", "continue", "restart", "continue"])
def test_the_log_has_the_thread_that_the_upstreams_model_read(renderer: TemplateRenderer, steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder), renderer, steps))
