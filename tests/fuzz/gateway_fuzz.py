"""Random traffic for a gateway in process: agents that talk soundly and oddly, engines that answer soundly and oddly.

Invariants: request number i of a seed is always the same, given the answers before it; sound traffic is among the odd,
so that there are conversations to continue, sessions to end and replies to judge."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import orjson

from millrace.dialects.answers import answer_in
from millrace.dialects.rendering.template import TemplateRenderer
from tests.support import odd_json
from tests.support.in_process import Answer, InProcess, Played

KEYS = {"sk-one": "one", "sk-two": "two"}
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TEXTS = ("hi", "What is 3 + 4?", "ü\n", " ", "", "<|im_end|>", "x " * 300)
SAID: tuple[dict[str, Any], ...] = (
    {"role": "tool", "tool_call_id": "c", "name": "f", "content": "7"},
    {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "text", "text": "here"}], "name": "ann"},
    {"role": "developer", "content": "be brief"},
)
"""messages in every form that clients give them"""
LABELLED: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "logit_bias": {"5": 1.0},
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
}
"""what alters or holds a reply, which then never trains"""
UNSERVED: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "web_search_options": {},
    "modalities": ["text", "audio"],
}
"""what an engine's gateway refuses, since it would change nothing"""
NAMES = ("ann", "ü" * 512, "ü" * 1000)
"""below, at and beyond the bound of names, which counts bytes"""
EVENTS: tuple[dict[str, Any], ...] = (
    {"kind": "tool_call", "name": "f", "call_id": "c", "arguments": "{}"},
    {"kind": "tool_result", "name": "f", "call_id": "c", "content": "7", "latency_us": 5, "status": "ok"},
    {"kind": "observation", "content": "a page", "media_type": "text/html", "origin": "browser"},
    {"kind": "internal_state", "summary": "s", "confidence": 0.5, "injected": [{"kind": "memory", "id": "m"}]},
    {"kind": "user_feedback", "rating": 1.0, "label": "good", "text": "yes"},
    {"kind": "security_label", "classification": "internal", "labels": ["pii"], "scopes": []},
)


class Traffic:
    """Requests to one gateway after another, all on one folder."""

    def __init__(self, seed: int, renderer: TemplateRenderer) -> None:
        self.random = Random(seed)
        encode = renderer.tokenizer.encode
        self._replies = [encode(text + "<|im_end|>") for text in self._texts()]
        self.sessions: list[tuple[str, str]] = []
        self._own = ("none", "sk-one")
        self.passed: Played | None = None
        """what an upstream beside the engines answered to the newest request, None where it was not asked"""
        self.responses: list[str] = ["chatcmpl-x"]
        self.talks: list[list[Any]] = []

    def _texts(self) -> list[str]:
        r, out = self.random, ["The answer is 42.", "", "<think>\nso\n</think>\n\nyes", "x" * 300]
        for _ in range(200):
            given = odd_json.text({"name": "f", "arguments": odd_json.changed(r, {"a": 1, "b": {"c": [2.5, "x"]}})})
            if r.random() < 0.2:
                given = odd_json.text(odd_json.changed(r, {"name": "f", "arguments": {}}))
            given = given.encode(errors="replace").decode()[:400]
            out.append(f"{r.choice(('', 'so ', '<think>'))}<tool_call>\n{given}\n</tool_call>{r.choice(('', 'ok'))}")
        return out

    # ------------------------------------------------------------------ what engines answer

    def engine(self, body: bytes, label: str = "policy@0") -> Played:
        """vLLM's generate route, of an engine that says that it serves this."""
        r, asked = self.random, orjson.loads(body)
        n, stream = asked["sampling_params"]["n"], asked["stream"]
        if r.random() < 0.02:
            return Played(r.choice((400, 404, 429, 500, 503)), [b'{"error":{"message":"no"}}'], {"retry-after": "7"})
        usage = {"prompt_tokens": len(asked["token_ids"]), "completion_tokens": 1}
        messages: list[Any] = []
        for index in range(n):
            ids = r.choice(self._replies)
            logprob = {"logprob": -0.5, "top_logprobs": [{"token_id": 5, "logprob": -1.5}]}
            choice = {"index": index, "token_ids": ids, "logprobs": {"content": [logprob] * len(ids)}}
            spans = [{"version": label, "start": 0, "end": len(ids)}]
            messages.append({**choice, "finish_reason": "stop", "weight_versions": spans})
        if not stream:
            whole: Any = {"choices": messages, "usage": usage}
            return Played(parts=[self._odd(whole, 0.1)])
        events = [b"data: " + self._odd({"choices": [choice]}, 0.05) + b"\n\n" for choice in messages]
        events += [b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n", b"data: [DONE]\n\n"]
        return Played(parts=events)

    def upstream(self, body: bytes) -> Played:
        """OpenAI's chat completions."""
        r = self.random
        if r.random() < 0.05:
            return Played(r.choice((400, 429, 503)), [b"no"], {"retry-after": "7"})
        calls = [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        said: dict[str, Any] = {"role": "assistant", "content": r.choice(TEXTS), "tool_calls": calls}
        if b'"stream":true' not in body.replace(b" ", b""):
            choice = {"index": 0, "message": said, "finish_reason": "stop"}
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
            return Played(parts=[self._odd({"id": "chatcmpl-7", "choices": [choice], "usage": usage}, 0.7)])
        parts = []
        for delta in ({"role": "assistant", "content": ""}, said, {"content": "x"}, {"tool_calls": calls}, {}):
            choice = {"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}
            parts.append(b"data: " + self._odd({"id": "chatcmpl-8", "choices": [choice]}, 0.4) + b"\n\n")
        whole = b"".join([*parts, b"data: [DONE]\n\n"])
        at = r.randrange(len(whole))
        return Played(parts=[whole[:at], whole[at:]])

    def _odd(self, message: Any, share: float) -> bytes:
        r = self.random
        if r.random() >= share:
            return orjson.dumps(message)
        data = odd_json.text(odd_json.changed(r, message)).encode(errors="surrogatepass")
        return odd_json.broken(r, data) if r.random() < 0.2 else data

    @property
    def parts(self) -> Mapping[str, Any]:
        """What a gateway of this traffic has beside its own engines."""
        return {}

    def check(self, gateway: InProcess, path: str, body: bytes, answer: Answer, first: int) -> None:
        """Laws of the newest request that follow from what this traffic knows; its records lie from `first` on."""

    # ------------------------------------------------------------------ what clients ask

    async def one(self, gateway: InProcess) -> tuple[str, bytes, Answer]:
        """Send the next request; returns its path, its body and the answer."""
        r = self.random
        self._own = r.choice(self.sessions) if self.sessions else ("none", "sk-one")
        key, named = self._key(), {}
        if r.random() < 0.2:
            named["x-millrace-session"] = r.choice(("chat-1", "chat-2", "ü", "", "x" * 2000, "a/b"))
        path, given, method = self._asked()
        data = odd_json.text(given).encode(errors="surrogatepass")
        kind = r.random()
        if kind < 0.5:
            data = odd_json.text(odd_json.changed(r, given)).encode(errors="surrogatepass")
        if kind < 0.08:
            data = odd_json.broken(r, data)
        headers = {**named, **({"authorization": f"Bearer {key}"} if key else {})}
        if r.random() < 0.03:
            headers["content-length"] = r.choice(("", "-1", "1e9", "9" * 50, "²", "12"))
        cut = r.randrange(len(data) + 1) if r.random() < 0.1 else len(data)
        answer = await gateway.ask(method, path, [data[:cut], data[cut:]], headers, leave=r.random() < 0.03)
        self._learn(path, given, answer)
        return path, data, answer

    def _key(self) -> str:
        r = self.random
        if r.random() < 0.06:
            return r.choice(("", "wrong", "mr-x.y", "mr-", "é", *(key for _, key in self.sessions)))
        return r.choice((self._own[1], "sk-one", "sk-one", "sk-two"))

    def _asked(self) -> tuple[str, Any, str]:
        r = self.random
        session = self._own[0] if r.random() < 0.95 else "none"
        kind = r.random()
        if kind < 0.5:
            return CHAT, self._chat(), "POST"
        if kind < 0.62:
            return "/v1/sessions", self._start(), "POST"
        if kind < 0.78:
            events = [dict(r.choice(EVENTS)) for _ in range(r.choice((1, 1, 2, 5)))]
            if r.random() < 0.1 and (named := [event for event in events if "name" in event]):
                named[0]["name"] = r.choice(NAMES)
            return f"/v1/sessions/{session}/events", {"events": events}, "POST"
        if kind < 0.9:
            reward = {"value": r.random(), "source": "agent", "reward_id": r.choice((None, "r1", "r2"))}
            more = {"response_id": r.choice(self.responses), "components": {"a": 1.0}, "label": "good", "span_end": 3}
            return f"/v1/sessions/{session}/reward", {**reward, **more}, "POST"
        if kind < 0.93:
            return f"/v1/sessions/{session}/end", {"status": "completed", "output": "x", "reason": None}, "POST"
        route = r.choice(
            ("/health", "/v1/models", "/v1/nothing", CHAT, "/v1/sessions/a/b/c", "/", "/v1/sessions/\x00/end")
        )
        return route, {}, r.choice(("GET", "GET", "POST", "PUT", "OPTIONS", "HEAD", "FOO"))

    def _chat(self) -> dict[str, Any]:
        r = self.random
        talk = r.choice(self.talks) if self.talks and r.random() < 0.5 else [{"role": "system", "content": "s"}]
        given: dict[str, Any] = {"model": "m", "messages": [*talk, {"role": "user", "content": r.choice(TEXTS)}]}
        if r.random() < 0.3:
            given["messages"] += [self._echoed(), *r.sample(SAID, r.randrange(len(SAID)))]
        if r.random() < 0.1:
            given["messages"] += [{"role": "tool", "content": "7", "tool_call_id": "c", "name": r.choice(NAMES)}]
        if r.random() < 0.5:
            given["tools"] = [TOOL]
        if r.random() < 0.3:
            given["stream"] = True
        options: dict[str, Any] = {
            "max_tokens": 1000, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "n": r.choice((1, 2)), "seed": 7,
            "logprobs": True, "stream_options": {"include_usage": True}, "metadata": {"a": 1}, "tool_choice": "auto",
            "stop": ["zz"], "user": "ann", "top_logprobs": 1, "max_completion_tokens": 5,
        }  # fmt: skip
        for name in r.sample(list(options), r.randrange(4)):
            given[name] = options[name]
        if r.random() < 0.05:
            odd = {**LABELLED, **UNSERVED}
            name = r.choice(list(odd))
            given[name] = odd[name]
        return given

    def _echoed(self) -> dict[str, Any]:
        """A reply with a call whose arguments are an object, as some clients write them, or text."""
        r, arguments = self.random, self._free({"a": 1, "b": {"c": [2.5, "x"]}})
        said = str(odd_json.nested(r)) if r.random() < 0.2 else arguments
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": said}}
        return {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"}

    def _free(self, given: dict[str, Any]) -> dict[str, Any]:
        """JSON that is a client's own to shape."""
        r = self.random
        if r.random() < 0.5:
            return given
        return {**given, "free": odd_json.wide(r) if r.random() < 0.2 else odd_json.value(r)}

    def _start(self) -> dict[str, Any]:
        r = self.random
        given = {
            "task_id": "t", "task": self._free({"a": [1]}), "group": r.choice(("g", None)), "group_size": 2,
            "sample": 1, "attempt": r.choice(("a", None)), "deadline": 3, "awaits": ["user"],
            "reward_deadline_ms": 5000, "min_version": 0, "mode": "online",
            "versions": {"agent": "a", "tools": {"f": "1"}}, "sampling": {"max_tokens": 5}, "budget": {"turns": 3},
        }  # fmt: skip
        return {name: given[name] for name in r.sample(list(given), r.randrange(len(given)))}

    def _learn(self, path: str, given: Any, answer: Answer) -> None:
        if answer.status != 200 or not answer.body.startswith(b"{"):
            return
        try:
            found = answer.json
            said = answer_in(found).choices if path == CHAT else []
        except (orjson.JSONDecodeError, AttributeError, TypeError):
            return  # an upstream's words, passed on as they are; what the gateway makes of them is judged elsewhere
        if path == "/v1/sessions":
            self.sessions = [*self.sessions[-20:], (found["session"], found["api_key"])]
        elif said:
            self.responses = [*self.responses[-20:], str(found.get("id"))]
            if len(given.get("messages", ())) in range(1, 20):
                message = said[0].message
                calls = message.get("tool_calls", ())
                tail = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls]
                self.talks = [*self.talks[-20:], [*given["messages"], message, *tail]]
