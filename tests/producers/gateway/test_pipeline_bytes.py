"""What becomes of a call, byte for byte: replies, records and their headers of both answerers in every dialect.

Law: a change of how calls are answered, streamed, marked, recorded and aborted changes no byte of a reply or a record.
A script of calls, plain and streamed, cut, refused, unreadable, left by their clients, rewarded, repeated and gone on
with after a restart, is played before a scripted engine and a scripted upstream. All that came of it is written as
text, with ids by the order in which they appear and without times, and the digest of that text is known.

    python -m tests.producers.gateway.test_pipeline_bytes chat      # the text of one dialect, to compare two trees by
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.dialects.all import DIALECTS
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.upstream import TextUpstream
from millrace.infra.errors import EngineRejected, EngineUnavailable
from millrace.producers.gateway.prices import Prices
from millrace.producers.gateway.spending import KeyLimits
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.schemas import codec
from tests.support import chat_tokenizer
from tests.support.fake_http import FakeServer, Script, answer, hang_up, serving, stream
from tests.support.gateway_world import WORKERS, ScriptedEngine, World, world
from tests.support.upstream_answers import EVENTS, WHOLE

DIGESTS = {
    "chat": "3677ea0f29425153da3f74090f1145a6add1d3d1b320455e2555cbeb461f3297",
    "completions": "49a2a23ebf85e64e50aec42074c95229cf2e97de1b1e175f8898b93184f08a72",
    "messages": "f9e0d98a30ef7e471063081f8ec704793f5e97d603c736d4ad260de3f7e148fe",
    "responses": "ba59359a375a7226932a5f6f1b7bb40f93c4572d7973b60a86756ed78af70b3c",
}
"""of the text of each dialect"""
PATHS = {dialect.name: dialect.path for dialect in DIALECTS}
ALL = frozenset(PATHS)
REPLY = (
    "<think>\nwhich tool?\n</think>\n\nBoth.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1.0, "b": "Zürich"}}\n</tool_call>'
)
FUNCTION = {"name": "add", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOLS: dict[str, dict[str, Any]] = {
    "chat": {"tools": [{"type": "function", "function": FUNCTION}]},
    "completions": {},
    "responses": {"tools": [{"type": "function", **FUNCTION}]},
    "messages": {"tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}]},
}
ID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    r"|(?<=call_)[0-9a-f]{24}|(?<=fc_)[0-9a-f]{24}|(?<=toolu_)[0-9a-f]{24}"
)
KEY = re.compile(r"sk-[A-Za-z0-9_.-]{30,}")
TIMES = re.compile(r"(\"?'?(?:created(?:_at)?|completed_at)'?\"?: ?)\d+(?:\.\d+)?")
MASKED = {"latency_us", "ttft_us", "event_time", "capture_time", "prev_hash", "hash", "trace_id", "observed_at"}


class Account:
    """The text of what came of a script. `unsteady`: strings of this run, as addresses, and what stands for them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.unsteady: dict[str, str] = {}
        self._ids: dict[str, str] = {}

    def add(self, label: str, content: object) -> None:
        text = f"{label}: {content!r}"
        for word, name in self.unsteady.items():
            text = text.replace(word, name)
        text = TIMES.sub(r"\1T", text)
        text = ID.sub(lambda match: self._ids.setdefault(match.group(), f"#{len(self._ids)}"), text)
        self.lines.append(KEY.sub("KEY", text))

    def text(self) -> str:
        return "\n".join(self.lines)


def body(dialect: str, *, streamed: bool, model: str, turns: tuple[str, ...] = ("hi",), **more: Any) -> bytes:
    """A request; odd turns are the user's."""
    request: dict[str, Any] = {"model": model, "stream": streamed, **more}
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    if dialect == "responses":
        request |= {"input": messages}
    elif dialect == "completions":
        request |= {"prompt": " ".join(turns), "max_tokens": 60}
    else:
        request |= {"messages": messages, "max_tokens": 60}
    return json.dumps(request).encode()


def far_whole(dialect: str) -> Script:
    return answer(json.dumps(WHOLE[dialect], indent=1).encode())


def far_events(dialect: str) -> list[bytes]:
    done = [b"data: [DONE]\n\n"] if dialect in ("chat", "completions") else []
    ends = [{"type": "message_stop"}] if dialect == "messages" else []
    return [f"data: {json.dumps(event)}\n\n".encode() for event in [*EVENTS[dialect], *ends]] + done


class Play:
    """The script of one dialect, in one world."""

    def __init__(self, account: Account, dialect: str, w: World, engine: ScriptedEngine, far: FakeServer) -> None:
        self.account = account
        self.dialect = dialect
        self.w = w
        self.engine = engine
        self.far = far
        self.words = REPLY
        """what the engine says"""

    async def call(self, label: str, request: bytes, key: str = "mine", **headers: str) -> httpx.Response:
        got = await self.w.http.post(
            PATHS[self.dialect], content=request, headers={"authorization": f"Bearer {key}", **headers}
        )
        kept = {name: text for name, text in got.headers.items() if name not in ("date", "server")}
        self.account.add(label, (got.status_code, sorted(kept.items()), got.content))
        return got

    async def leave(self, label: str, request: bytes, begun: Callable[[], bool], key: str = "mine") -> None:
        """A client that goes away once the call is as far as `begun` says."""
        call = asyncio.create_task(
            self.w.http.post(PATHS[self.dialect], content=request, headers={"authorization": f"Bearer {key}"})
        )
        while not begun():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        sessions = self.w.gateway.sessions
        while any(session.busy for session in sessions.live.values()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        self.account.add(label, "left")

    def of(self, *, streamed: bool, model: str = "m", turns: tuple[str, ...] = ("hi",), **more: Any) -> bytes:
        return body(self.dialect, streamed=streamed, model=model, turns=turns, **more)

    async def engines(self) -> None:
        """Calls that the engine answers."""
        several = self.dialect in ("chat", "completions")
        for streamed in (False, True):
            kind = "stream" if streamed else "plain"
            await self.call(f"engine {kind}", self.of(streamed=streamed, **TOOLS[self.dialect]))
            await self.call(f"engine {kind} once more", self.of(streamed=streamed, **TOOLS[self.dialect]))
            self.words = "Plain words."
            talk = (f"a {kind}", "Plain words.", "go on")
            await self.call(f"engine {kind} first turn", self.of(streamed=streamed, turns=talk[:1]))
            await self.call(f"engine {kind} go on", self.of(streamed=streamed, turns=talk))
            self.words = REPLY
            if several:
                await self.call(f"engine {kind} two", self.of(streamed=streamed, turns=("two",), n=2))
                logprobs = {"logprobs": True, "top_logprobs": 0} if self.dialect == "chat" else {"logprobs": 0}
                await self.call(f"engine {kind} logprobs", self.of(streamed=streamed, turns=("l",), **logprobs))
            await self.call(f"engine {kind} greedy", self.of(streamed=streamed, turns=("g",), temperature=0))
            self.engine.error = EngineRejected("no", 400)
            await self.call(f"engine {kind} refused", self.of(streamed=streamed, turns=("refused",)))
            self.engine.error = EngineUnavailable("gone")
            await self.call(f"engine {kind} gone", self.of(streamed=streamed, turns=("gone",)))
            self.engine.break_after = 5
            await self.call(f"engine {kind} broken", self.of(streamed=streamed, turns=("broken",)))
            self.engine.error = self.engine.break_after = None
            self.w.acknowledge(0)
            self.engine.finish = "abort"
            await self.call(f"engine {kind} aborted", self.of(streamed=streamed, turns=("aborted",)))
            self.engine.finish = None
            self.engine.gate = asyncio.Semaphore(6 if streamed else 0)
            count = len(self.engine.asked)
            await self.leave(
                f"engine {kind} left",
                self.of(streamed=streamed, turns=("left",)),
                lambda count=count: len(self.engine.asked) > count,
            )
            self.engine.gate = None
            await self.call(f"engine {kind} unknown field", self.of(streamed=streamed, turns=("n",), n=0))
        await self.call("no json", b"{")
        await self.call("no key", self.of(streamed=False), "other")

    async def upstreams(self) -> None:
        """Calls that an upstream answers."""
        whole, events = far_whole(self.dialect), far_events(self.dialect)
        for streamed in (False, True):
            kind = "stream" if streamed else "plain"
            sound = stream(*events) if streamed else whole
            halves = b"".join(events)
            scripts: dict[str, list[Script]] = {
                "sound": [sound],
                "once more": [sound],
                "cut anywhere": [stream(halves[:50], halves[50:90], halves[90:])],
                "broken": [stream(*events[:2], then="cut")],
                "hung up": [hang_up],
                "refused": [answer(b'{"error": {"message": "no quota"}}', 429)],
                "unreadable": [answer(b"<html>", kind="text/html")],
                "unreadable stream": [stream(b"data: {\n\n", *events)],
                "empty": [answer(b"")],
            }
            for name, given in scripts.items():
                self.far.scripts[:] = given
                await self.call(f"upstream {kind} {name}", self.of(streamed=streamed, model="far"))
            self.far.scripts[:] = [sound]
            request = self.of(streamed=streamed, model="far", turns=("a", "x", "b"))
            await self.call(f"upstream {kind} go on", request, **{"idempotency-key": "one", "x-session-id": "n"})
            await self.call(f"upstream {kind} renamed", self.of(streamed=streamed, model="far-other", turns=("r",)))
            self.far.scripts[:] = [answer(b"", 500), sound]
            await self.call(f"upstream {kind} retried", self.of(streamed=streamed, model="far-other", turns=("t",)))
            hanging = stream(*events[:2], then="hang") if streamed else stream(then="hang")
            self.far.scripts[:] = [hanging]
            count = len(self.far.requests)
            await self.leave(
                f"upstream {kind} left",
                self.of(streamed=streamed, model="far", turns=("left",)),
                lambda count=count: len(self.far.requests) > count,
            )
        for head, sent in self.far.requests:
            lines = [line for line in head.split("\r\n") if not line.lower().startswith(("host:", "user-agent:"))]
            self.account.add("upstream got", (lines, sent))

    async def sessions(self) -> None:
        """Calls of sessions with keys of their own, rewarded and ended."""
        self.far.scripts[:] = [far_whole(self.dialect)]
        for model in ("m", "far"):
            granted = await self.w.start(awaits=["judge"])
            await self.call(f"session {model}", self.of(streamed=False, model=model), granted["api_key"])
            await self.call(f"session {model} stream", self.of(streamed=True, turns=("s",)), granted["api_key"])
            for path, sent in (
                ("reward", {"source": "judge", "reward_id": "r", "value": 1.0}),
                ("end", {"status": "completed"}),
            ):
                got = await self.w.http.post(
                    f"/v1/sessions/{granted['session']}/{path}",
                    json=sent,
                    headers={"authorization": f"Bearer {granted['api_key'] if path == 'end' else WORKERS}"},
                )
                self.account.add(path, (got.status_code, got.content))
            await self.call(f"session {model} ended", self.of(streamed=False, model=model), granted["api_key"])

    def records(self) -> None:
        """All that is in the log."""
        for kept in self.w.log.read():
            event = codec.decode_as("Event", kept.entry.value)
            data = codec.decode_body(event["kind"], event["body"])
            fields = {name: value for name, value in {**event, "body": data}.items() if name not in MASKED}
            fields["body"] = {name: value for name, value in data.items() if name not in MASKED}
            headers = {name: text for name, text in kept.entry.headers.items() if not name.startswith("_rest")}
            if str(fields["body"].get("engine_version", "")).endswith("/v1"):
                headers.pop("_reply", None)  # whether a part went before its record, the network decides
            self.account.add("record", (sorted(fields.items()), sorted(headers.items())))


async def played(dialect: str, folder: Path, renderer: TemplateRenderer) -> str:
    """The text of a dialect."""

    def script(prompt: list[int], sampling: Sampling, choice: int) -> list[int]:
        return renderer.tokenizer.encode(f"{play.words}{choice or ''}<|im_end|>")

    account = Account()
    for life in range(2):
        engine = ScriptedEngine(script)
        async with serving(hang_up) as far:
            account.unsteady[far.url] = "http://far"
            upstream = Upstream("far", TextUpstream(f"{far.url}/v1", "sk-far"), ALL, 1)
            rules = [
                RouteRule("far", "far", prices=Prices(1.0, 2.0, 0.5)),
                RouteRule("far-*", "far", send_as="sent-as"),
            ]
            routed = Upstreams([upstream], rules, first_s=0.0)
            keys = {"mine": "local", WORKERS: "local"}
            paid = {
                "keys": keys,
                "key_names": {"mine": "m"},
                "limits": {"m": KeyLimits()},
                "prices": Prices(3.0, 4.0, 1.0),
            }
            async with world(folder, renderer, engine, upstream=routed, followups=True, **paid) as w:
                account.unsteady[w.url] = "http://near"
                play = Play(account, dialect, w, engine, far)
                w.acknowledge(0)
                if not life:
                    await play.engines()
                    await play.upstreams()
                    await play.sessions()
                else:
                    far.scripts[:] = [far_whole(dialect)]
                    for model in ("m", "far"):
                        for turns in (
                            ("hi",),
                            ("a", "x", "b"),
                            ("a plain", "Plain words.", "go on", "Plain words.", "more"),
                        ):
                            await play.call(f"after a start {model}", play.of(streamed=False, model=model, turns=turns))
                    play.records()
    return account.text()


@pytest.mark.slow
@pytest.mark.parametrize("dialect", sorted(ALL))
async def test_no_byte_of_a_reply_or_a_record_changes(tmp_path: Path, renderer: TemplateRenderer, dialect: str):
    text = await played(dialect, tmp_path, renderer)
    assert hashlib.sha256(text.encode()).hexdigest() == DIGESTS[dialect], text[-2000:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        writer = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(Path(name) / "tokenizer")))
        print(asyncio.run(played(sys.argv[1], Path(name), writer)))
