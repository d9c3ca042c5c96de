"""One chat call while it runs: the choices as they are sampled, and what is said about them on the wire and in the log.

Invariants: ids, log-probabilities and version spans are kept as the engine gave them, in its order; a granted session's
call is trainable only if every token has a known version at or above the grant's; the recorded response is the JSON
that a client gets, for streams the same assembled."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from producers.engines.base import Chunk, Sampling, Span, Usage, token_versions
from producers.gateway.fleet import Target
from producers.gateway.lineage import ABORT, Plan
from producers.gateway.rendering.base import Delta, Parser, Renderer
from producers.gateway.session import Session
from producers.gateway.wire import ChatRequest
from schemas.arrays import pack
from schemas.ids import new_id, now_micros


@dataclass(slots=True)
class Choice:
    """One of the replies asked for. `calls` are its tool calls as the client sees them."""

    index: int
    parser: Parser
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    finish: str | None = None
    stop: str | int | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    begun: bool = False

    def feed(self, chunk: Chunk) -> list[Delta]:
        """Take what the engine sampled; returns what can be said of it."""
        at_once = not self.ids and chunk.finish_reason is not None
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.tops += chunk.tops
        deltas = self.parser.whole(chunk.token_ids) if at_once else self.parser.feed(chunk.token_ids)
        if chunk.finish_reason is not None:
            self.finish, self.stop, self.spans = chunk.finish_reason, chunk.stop_reason, chunk.spans
            if not at_once:
                deltas += self.parser.finish()
        return [delta if delta.call is None else self._mint(delta) for delta in deltas]

    def _mint(self, delta: Delta) -> Delta:
        assert delta.call is not None
        function = {"name": delta.call.name, "arguments": delta.call.arguments}
        self.calls.append({"id": f"call_{os.urandom(12).hex()}", "type": "function", "function": function})
        return delta

    @property
    def reason(self) -> str:
        """OpenAI's finish reason; abort for a reply that was cut off."""
        if self.finish in ("stop", None) and self.calls and self.finish is not None:
            return "tool_calls"
        return self.finish or ABORT

    def message(self) -> dict[str, Any]:
        """The assistant message."""
        reply = self.parser.reply
        out: dict[str, Any] = {"role": "assistant", "content": reply.content if self.calls else reply.content or ""}
        if reply.reasoning:
            out["reasoning_content"] = reply.reasoning
        if self.calls:
            out["tool_calls"] = self.calls
        return out


@dataclass(slots=True, eq=False)
class Call:
    """One request being served."""

    session: Session
    request: ChatRequest
    body: bytes
    plan: Plan
    sampling: Sampling
    renderer: Renderer
    target: Target
    response_id: str
    began: float = field(default_factory=time.perf_counter)
    when: int = field(default_factory=now_micros)
    call_id: str = field(default_factory=new_id)
    first: float | None = None
    usage: Usage | None = None
    choices: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        tools = None if self.request.tool_choice == "none" else self.request.offered
        stop = self.sampling.stop
        self.choices = [
            Choice(index, self.renderer.parser(self.plan.prompt, tools, stop)) for index in range(self.sampling.n)
        ]

    def take(self, chunk: Chunk) -> tuple[Choice, list[Delta]]:
        """A chunk of the engine: the choice it belongs to, and what can be said of it."""
        if self.first is None:
            self.first = time.perf_counter()
        if chunk.usage is not None:
            self.usage = chunk.usage
        choice = self.choices[chunk.index]
        return choice, choice.feed(chunk)

    @property
    def finished(self) -> bool:
        """Whether every choice has come to its end."""
        return all(choice.finish is not None for choice in self.choices)

    # ------------------------------------------------------------------ on the wire

    def head(self, kind: str) -> dict[str, Any]:
        """What every response and every chunk begins with."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.when // 1_000_000,
            "model": self.request.model,
            "system_fingerprint": None,
        }

    def usage_body(self) -> dict[str, Any]:
        """Token counts as OpenAI reports them."""
        prompt, completion = len(self.plan.prompt), sum(len(choice.ids) for choice in self.choices)
        cached = self.usage.cached if self.usage else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def response(self) -> bytes:
        """The whole response."""
        choices = [
            {
                "index": choice.index,
                "message": choice.message(),
                "logprobs": self.logprobs(choice, 0, len(choice.ids)),
                "finish_reason": choice.reason,
            }
            for choice in self.choices
        ]
        return orjson.dumps({**self.head("chat.completion"), "choices": choices, "usage": self.usage_body()})

    def logprobs(self, choice: Choice, start: int, end: int) -> dict[str, Any] | None:
        """OpenAI's log-probabilities of tokens [start, end), None where the client did not ask."""
        if not self.request.logprobs:
            return None
        tops = choice.tops[start:end] if choice.tops else [()] * (end - start)
        content = [
            {**self._token(id, logprob), "top_logprobs": [self._token(*other) for other in others]}
            for id, logprob, others in zip(choice.ids[start:end], choice.logprobs[start:end], tops, strict=False)
        ]
        return {"content": content}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        text = self.renderer.text(id)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}

    # ------------------------------------------------------------------ in the log

    def record(self, choice: Choice, response: bytes, engine_version: str) -> tuple[dict[str, Any], str | None]:
        """The ModelCall body of one choice, and why its versions break a grant (None when they do not)."""
        placed = self.session.lineages.placed(self.plan, choice.index, self.sampling.n)
        versions = token_versions(choice.spans, len(choice.ids), self.session.policy)
        breach = self._breach(versions)
        why = self._why_not(choice) or breach
        ended = time.perf_counter()
        completion = len(choice.ids)
        return {
            "call_id": self.call_id,
            "response_id": self.response_id,
            "choice": choice.index,
            "lineage": placed["lineage"],
            "opened": placed["opened"],
            "supersedes": self.plan.supersedes,
            "turn": self.plan.turn,
            "prefix_len": placed["prefix_len"],
            "prompt_ids": pack(placed["prompt"], "int32"),
            "output_ids": pack(choice.ids, "int32"),
            "output_logprobs": pack(choice.logprobs, "float32"),
            "output_versions": pack(versions, "int32"),
            "request": self.body,
            "response": response,
            "sampling": {
                "temperature": self.sampling.temperature,
                "top_p": self.sampling.top_p,
                "top_k": self.sampling.top_k,
                "max_tokens": self.sampling.max_tokens,
                "seed": self.sampling.seed,
                "stop": list(self.sampling.stop),
                "n": self.sampling.n,
            },
            "finish_reason": choice.reason,
            "stop_condition": None if choice.stop is None else str(choice.stop),
            "engine": self.target.engine.kind,
            "engine_version": engine_version,
            "engine_incarnation": self.target.incarnation,
            "tokenizer_hash": self.renderer.tokenizer_hash,
            "template_hash": self.renderer.template_hash,
            "usage": {
                "prompt": len(self.plan.prompt),
                "completion": completion,
                "cached": self.usage.cached if self.usage else 0,
            },
            "cost": None,
            "latency_us": int((ended - self.began) * 1e6),
            "ttft_us": int(((self.first or ended) - self.began) * 1e6),
            "trainable": why is None,
            "untrainable_reason": why,
        }, breach

    def _breach(self, versions: Any) -> str | None:
        if not self.session.granted or not len(versions):
            return None
        if (versions < 0).any():
            return "unknown_version"
        return "old_version" if (versions < self.session.start["min_version"]).any() else None

    def _why_not(self, choice: Choice) -> str | None:
        if choice.reason == ABORT:
            return "aborted"
        if not choice.ids:
            return "no_tokens"
        if self.sampling.temperature == 0:
            return "greedy"
        if not self.sampling.from_policy:
            return "altered_sampling"
        return None if all(map(math.isfinite, choice.logprobs)) else "bad_logprobs"
