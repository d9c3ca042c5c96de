"""Random traffic of every API over every route, mixed in the same sessions: HTTP and WebSockets, several policies and
versions of them, engines and an upstream that speaks everything beside them.

Laws that this traffic knows of its answers (`check`): who names a version gets that one or none, and the record says
so; nobody goes on from a response that was told to another tenant; what an upstream answers whole comes back byte for
byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson

from millrace.dialects.all import COMPLETIONS, MESSAGES, RESPONSES
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.gateway.prices import Prices
from millrace.producers.gateway.spending import KeyLimits
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import ONE
from millrace.schemas import codec
from millrace.schemas.records import Event, ModelCall
from tests.fuzz.completions_fuzz import CompletionsTraffic
from tests.fuzz.gateway_fuzz import CHAT, KEYS, NAMES, TEXTS, Traffic
from tests.fuzz.messages_fuzz import MessagesTraffic
from tests.fuzz.responses_fuzz import ResponsesTraffic
from tests.support import odd_json, upstream_answers
from tests.support.in_process import POLICY, Answer, Far, InProcess, Played, Script

OTHER = "other"
VERSIONS = {POLICY: 0, OTHER: 3}
"""what the engines of each policy serve"""
FAR = ("far", "far-1")
MODELS = (
    *("m", POLICY, OTHER) * 3,
    *FAR * 5,
    *(f"{POLICY}@0", f"{OTHER}@3", f"{POLICY}@3", f"{OTHER}@0"),
    *(f"{OTHER}@", f"{POLICY}@x", f"{OTHER}@{'9' * 40}", "@"),
)
RULES = (RouteRule("far", ONE, prices=Prices(1.0, 2.0, 0.5)), RouteRule("far-*", ONE, send_as="near"))
KEY_NAMES = {key: f"key-{tenant}" for key, tenant in KEYS.items()}
LIMITS = {name: KeyLimits(tokens_per_minute=10**15, budget=1e15) for name in KEY_NAMES.values()}
"""that nobody reaches: what is spent is counted"""
SOCKET = "socket"
"""stands for the path of a request over a WebSocket"""
EMBEDDINGS = "/v1/embeddings"
VECTORS = {"data": [], "usage": {"prompt_tokens": 3}}
API = {"/chat/completions": "chat"} | {
    one.path.removeprefix("/v1"): one.name for one in (COMPLETIONS, MESSAGES, RESPONSES)
}
CALLS = frozenset({CHAT, MESSAGES.path, RESPONSES.path, COMPLETIONS.path})


class EveryTraffic(MessagesTraffic, ResponsesTraffic, CompletionsTraffic):
    """Each API, and each kind of route, is as likely as any other."""

    def __init__(self, seed: int, renderer: TemplateRenderer) -> None:
        super().__init__(seed, renderer)
        self._told: dict[str, str] = {}
        """responses, and the tenant that was told each of them"""

    @property
    def parts(self) -> Mapping[str, Any]:
        """What a gateway of this traffic stands before."""
        others: dict[str, Script] = {OTHER: partial(self.engine, label=f"{OTHER}@{VERSIONS[OTHER]}")}
        far = Far(RULES, self.answered)
        return {"far": far, "others": others, "versions": VERSIONS, "key_names": KEY_NAMES, "limits": LIMITS}

    # ------------------------------------------------------------------ what an upstream answers

    def answered(self, path: str, body: bytes) -> Played:
        """Of any API, at its path."""
        r = self.random
        if r.random() < 0.05:
            self.passed = Played(r.choice((400, 404, 429, 503)), [b"no"], {"retry-after": "0"})
            return self.passed
        api = API.get(path.partition("?")[0])
        if api is None:
            counted = VECTORS if path.startswith("/embeddings") else {"input_tokens": 7}
            self.passed = Played(parts=[self._odd(counted, 0.9)])
        elif b'"stream":true' in body.replace(b" ", b""):
            data = upstream_answers.stream(r, api)
            at = r.randrange(len(data) + 1)
            self.passed = Played(parts=[data[:at], data[at:]], headers={"content-type": "text/event-stream"})
        else:
            self.passed = Played(parts=[upstream_answers.whole(r, api)])
        return self.passed

    # ------------------------------------------------------------------ what clients ask

    async def one(self, gateway: InProcess) -> tuple[str, bytes, Answer]:
        self.passed = None
        if self.random.random() < 0.3:
            gateway.acknowledge()
        if self.random.random() < 0.1:
            return await self._over_a_socket(gateway)
        return await super().one(gateway)

    def _asked(self) -> tuple[str, Any, str]:
        r = self.random
        ways: tuple[Callable[[], tuple[str, Any, str]], ...] = (
            lambda: (CHAT, self._chat(), "POST"),
            lambda: MessagesTraffic._asked(self),
            lambda: ResponsesTraffic._asked(self),
            lambda: CompletionsTraffic._asked(self),
            lambda: Traffic._asked(self),
            self._embeddings,
            self._beside,
        )
        path, given, method = r.choice(ways)()
        if "model" in given:
            given["model"] = r.choice(MODELS)
        return path, given, method

    def _embeddings(self) -> tuple[str, Any, str]:
        r = self.random
        given = {"input": r.choice((r.choice(TEXTS), ["a", "b"], [5, 6], [[5], [6]])), "encoding_format": "float"}
        return EMBEDDINGS, {"model": "", **given, **({"user": "ann"} if r.random() < 0.3 else {})}, "POST"

    def _beside(self) -> tuple[str, Any, str]:
        """Counts of tokens, feedback, and the lists of models."""
        r = self.random
        kind = r.random()
        if kind < 0.4:
            asked = {name: part for name, part in self._message().items() if name not in ("max_tokens", "stream")}
            return f"{MESSAGES.path}/count_tokens", asked, "POST"
        if kind < 0.9:
            session = r.choice((self._own[0], self._own[0], "chat-1", "none"))
            about: dict[str, Any] = (
                {"session": session} if r.random() < 0.5 else {"response_id": r.choice(self.responses)}
            )
            said = r.choice(({"rating": 1.0}, {"label": "good"}, {"text": "so"}, {"correction": "42"}))
            more = {"user": "ann", "source": "user", "reward_id": r.choice(("r1", *NAMES)), "confidence": 0.5}
            return "/v1/feedback", {**about, **said, **dict(r.sample(list(more.items()), r.randrange(4)))}, "POST"
        return (
            r.choice(("/v1/models", f"/v1/models/{r.choice(MODELS)}", EMBEDDINGS)),
            {},
            r.choice(("GET", "GET", "PUT")),
        )

    async def _over_a_socket(self, gateway: InProcess) -> tuple[str, bytes, Answer]:
        """A few frames, the last of which goes with the answer, whose status is 200 where no error came."""
        r, frames = self.random, list[bytes]()
        self._own = r.choice(self.sessions) if self.sessions else ("none", "sk-one")
        key = self._key()
        for _ in range(r.choice((1, 1, 2, 3))):
            given: Any = {"type": "response.create", **self._response(), "model": r.choice(MODELS)}
            if (kind := r.random()) < 0.4:
                given = odd_json.changed(r, given)
            data = odd_json.text(given).encode(errors="surrogatepass")
            frames.append(odd_json.broken(r, data) if kind < 0.08 else data)
        got = await gateway.frames(RESPONSES.path, frames, {"authorization": f"Bearer {key}"} if key else {})
        last = got.events[-1] if got.events else {"type": "error", "status": 401, "error": {"message": "refused"}}
        status = last.get("status", 502) if last["type"] == "error" else 200  # one amid a response has no status
        return SOCKET, frames[-1], Answer(status, {}, orjson.dumps(last))

    def _learn(self, path: str, given: Any, answer: Answer) -> None:
        if self.passed is None:  # else these are words of an upstream, sound or not
            super()._learn(path, given, answer)

    # ------------------------------------------------------------------ laws

    def check(self, gateway: InProcess, path: str, body: bytes, answer: Answer, first: int) -> None:
        if path == SOCKET and answer.status != 200:
            assert answer.json["error"]["message"], answer
        whole = path != SOCKET and "event-stream" not in answer.headers.get("content-type", "")
        if self.passed is not None and whole and answer.status == self.passed.status:
            assert answer.body == b"".join(self.passed.parts), (answer, self.passed)
        asked: Any = {}
        if path in CALLS and self.passed is None and gateway.log.end > first:
            asked = json.loads(body.decode(errors="replace"), parse_int=float)
        for kept in gateway.log.read(first):
            event = codec.decode_as("Event", kept.entry.value)
            if event["kind"] == "model_call":
                call = codec.decode_body("model_call", event["body"])
                if asked:
                    self._check_call(asked, event, call)
                self._told[call["response_id"]] = event["tenant"]

    def _check_call(self, asked: Any, event: Event, call: ModelCall) -> None:
        model, tenant = asked.get("model"), event["tenant"]
        policy, at, version = model.rpartition("@")
        if at and policy in VERSIONS:
            assert (event["policy"], version) == (policy, str(VERSIONS[policy])), model
        if model in VERSIONS:
            assert event["policy"] == model, event["policy"]
        previous = asked.get("previous_response_id")
        if previous:  # an empty one names none
            assert self._told.get(previous) == tenant, f"{tenant} went on from {previous}"
