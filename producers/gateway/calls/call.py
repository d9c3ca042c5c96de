"""One call while it runs: the choices as they are sampled, and what is said about them in the log. What the client gets
is its dialect's to write.

Invariants: ids, log-probabilities and version spans are kept as the engine gave them, in its order; a granted session's
call is trainable only if every token has a known version at or above the grant's."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.dialects.base import Dialect
from millrace.dialects.conversation import Ask, Part, Text, Thinking, ToolUse, ToolUsePiece
from millrace.dialects.errors import RETRY_AFTER_S, ApiError
from millrace.dialects.rendering.base import Parser, ReplyDelta, Tools
from millrace.infra.engines.base import ABORT, Chunk, LabelSpan, Sampling, Usage, token_versions
from millrace.infra.process.offload import SLICE
from millrace.producers.gateway.calls.fleet import EngineTarget
from millrace.producers.gateway.calls.served_policy import Served
from millrace.producers.gateway.marks import minted_call
from millrace.producers.gateway.sessions.lineage import CallStart
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.producers.gateway.spending import Spent, spent
from millrace.schemas.arrays import pack
from millrace.schemas.ids import new_id, now_micros
from millrace.schemas.labels import make_label
from millrace.schemas.records import ModelCall
from millrace.schemas.requests import RequestOutline


def slices(chunk: Chunk) -> Iterator[Chunk]:
    """A chunk in pieces that take little time each; only the last of them ends what the chunk ends."""
    ids, count = chunk.token_ids, len(chunk.token_ids)
    step = max(1, SLICE // (1 + (len(chunk.tops[0]) if len(chunk.tops) else 0)))
    if count <= step:
        yield chunk
        return
    for start in range(0, count, step):
        end = start + step
        last = end >= count
        yield replace(
            chunk,
            token_ids=ids[start:end],
            logprobs=chunk.logprobs[start:end],
            tops=chunk.tops[start:end],
            finish_reason=chunk.finish_reason if last else None,
            stop_reason=chunk.stop_reason if last else None,
            spans=chunk.spans if last else (),
            usage=chunk.usage if last else None,
        )


@dataclass(slots=True)
class Choice:
    """One of the replies asked for. `calls` are its tool calls as messages hold them, with the ids that were minted."""

    index: int
    parser: Parser
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    spans: tuple[LabelSpan, ...] = ()
    finish: str | None = None
    stop: str | int | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    process: int = 0
    """the index of the one that mints the ids of its calls"""
    drafts: list[ToolUsePiece] = field(default_factory=list)
    """the pieces of the call that is being sampled"""

    def feed(self, chunk: Chunk) -> list[Part]:
        """Take what the engine sampled; returns what can be said of it: pieces of Text, Thinking and ToolUses."""
        at_once = not self.ids and chunk.finish_reason is not None
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.tops += chunk.tops
        deltas = self.parser.whole(chunk.token_ids) if at_once else self.parser.feed(chunk.token_ids)
        if chunk.finish_reason is not None:
            self.finish, self.stop, self.spans = chunk.finish_reason, chunk.stop_reason, chunk.spans
            if not at_once:
                deltas += self.parser.finish()
        return [self._part(delta) for delta in deltas]

    def _part(self, delta: ReplyDelta) -> Part:
        if delta.draft is not None:
            id = self.drafts[0].id if self.drafts else minted_call(self.process)
            self.drafts.append(ToolUsePiece(id, delta.draft.name, delta.draft.arguments))
            return self.drafts[-1]
        drafts, self.drafts = self.drafts, []
        if delta.call is not None:
            name, arguments = delta.call
            told = "".join(piece.arguments for piece in drafts)
            goes_on = bool(drafts) and drafts[0].name == name and arguments.startswith(told)
            id = drafts[0].id if goes_on else minted_call(self.process)
            function = {"name": name, "arguments": arguments}
            self.calls.append({"id": id, "type": "function", "function": function})
            return ToolUse(id, name, arguments)
        return Thinking(delta.reasoning) if delta.reasoning else Text(delta.content)

    @property
    def content(self) -> str | None:
        """Its text."""
        return self.parser.reply.content

    @property
    def reasoning(self) -> str | None:
        """Its thoughts."""
        return self.parser.reply.reasoning

    def parts(self) -> list[Part]:
        """The whole reply: its thoughts, its text, its calls, of each what there is."""
        reply = self.parser.reply
        out: list[Part] = []
        if reply.reasoning:
            out.append(Thinking(reply.reasoning))
        if reply.content:
            out.append(Text(reply.content))
        for call in self.calls:
            out.append(ToolUse(call["id"], call["function"]["name"], call["function"]["arguments"]))
        return out

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

    session: GatewaySession
    dialect: Dialect
    request: Ask
    body: bytes
    outline: RequestOutline | None
    plan: CallStart
    sampling: Sampling
    served: Served
    target: EngineTarget
    response_id: str
    identified_by: str
    """what put it into its session"""
    began: float = field(default_factory=time.perf_counter)
    when: int = field(default_factory=now_micros)
    call_id: str = field(default_factory=new_id)
    first: float | None = None
    usage: Usage | None = None
    version: int | None = None
    """the one that its model names, and that alone may sample it"""
    strayed: bool = False
    """whether another did"""
    lost: bool = False
    """whether a record of it could not be written"""
    marked: bool = False
    """whether it is marked as under way"""
    payer: str = ""
    """the name of the key that bears it"""
    process: int = 0
    """the index of the process that serves it, among those of its gateway"""
    choices: list[Choice] = field(default_factory=list)
    unshared: int = 0
    """tokens that were handled since others had their turn"""

    def __post_init__(self) -> None:
        tools = None if self.request.choice == "none" else self.request.tools
        stop = self.sampling.stop
        self.choices = [
            Choice(index, self._parser(tools, stop), process=self.process) for index in range(self.sampling.n)
        ]

    def _parser(self, tools: Tools, stop: Sequence[str]) -> Parser:
        if self.request.prompt is not None:
            return self.served.renderer.plain(stop)
        return self.served.renderer.parser(self.plan.prompt, tools, stop)

    def take(self, chunk: Chunk) -> tuple[Choice, list[Part]]:
        """A chunk of the engine: the choice it belongs to, and what can be said of it."""
        if self.first is None:
            self.first = time.perf_counter()
        if chunk.usage is not None:
            self.usage = chunk.usage
        choice = self.choices[chunk.index]
        return choice, choice.feed(chunk)

    @property
    def policy(self) -> str:
        """Whose reply it is. An episode of another policy has it in its history, and never trains on it."""
        return self.served.policy

    @property
    def granted(self) -> bool:
        """Whether a grant bounds its versions: a grant speaks of the versions of its own policy."""
        return self.session.granted and self.session.policy == self.policy

    @property
    def most(self) -> int:
        """Roughly how many numbers an engine may send for it: tokens, and rivals of each."""
        return self.sampling.n * self.sampling.max_tokens * (1 + self.sampling.top_logprobs)

    @property
    def finished(self) -> bool:
        """Whether every choice has come to its end."""
        return all(choice.finish is not None for choice in self.choices)

    def give_up(self) -> None:
        """Nobody waits for the reply any more."""
        for choice in self.choices:
            choice.finish = ABORT

    def check_version(self) -> None:
        """The end of a reply: one that another version than the named sampled, whole or in part, is given up. Raises
        ApiError 503."""
        if self.version is None:
            return
        for choice in self.choices:
            if (token_versions(choice.spans, len(choice.ids), self.policy) != self.version).any():
                self.strayed = True
        if self.strayed:
            self.give_up()
            label = make_label(self.policy, self.version)
            raise ApiError(
                503,
                f"The weights changed during this reply, which is not {label}'s: try again",
                type="server_error",
                code="version_changed",
                retry_after_s=RETRY_AFTER_S,
            )

    @property
    def told(self) -> int:
        """Roughly how many bytes its response has."""
        return sum(len(choice.ids) for choice in self.choices) * (100 if self.request.logprobs else 8)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that the engine had read before, as far as it says."""
        return self.usage.cached if self.usage else 0

    # ------------------------------------------------------------------ what its dialect writes, see `WritableCall`

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.plan.prompt)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all replies so far."""
        return sum(len(choice.ids) for choice in self.choices)

    @property
    def temperature(self) -> float:
        """At which it is sampled."""
        return self.sampling.temperature

    @property
    def top_p(self) -> float:
        """With which it is sampled."""
        return self.sampling.top_p

    @property
    def shortened(self) -> bool:
        """Whether replies may have fewer tokens than were asked for, since the context has no room for more."""
        asked = self.request.max_tokens
        return asked is not None and self.sampling.max_tokens < asked

    @property
    def keeps(self) -> bool:
        """Whether later requests may name its response."""
        return True

    def token(self, id: int) -> str:
        """The text of a token."""
        return self.served.renderer.text(id)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token."""
        return self.served.renderer.token_bytes(id)

    # ------------------------------------------------------------------ in the log

    def record(self, choice: Choice, response: bytes, engine_version: str) -> tuple[ModelCall, str | None]:
        """The ModelCall body of one choice, and why its versions break a grant (None when they do not)."""
        placed = self.session.lineages_of(self.policy).placed(self.plan, choice.index, self.sampling.n)
        versions = token_versions(choice.spans, len(choice.ids), self.policy)
        breach = self._breach(versions)
        why = "other_version" if self.strayed else self._why_not(choice) or breach
        ended = time.perf_counter()
        completion = len(choice.ids)
        stored = self.session.said_before(self.policy).stored(self.body, self.outline)
        return {
            "call_id": self.call_id,
            "response_id": self.response_id,
            "choice": choice.index,
            "lineage": placed["lineage"],
            "opened": placed["opened"],
            "supersedes": self.plan.supersedes,
            "turn": self.plan.turn,
            "prefix_len": placed["prefix_len"],
            "prompt_ids": {"dtype": "int32", "data": placed["prompt"]},
            "output_ids": pack(choice.ids, "int32"),
            "output_logprobs": pack(choice.logprobs, "float32"),
            "output_versions": pack(versions, "int32"),
            "request": stored.request,
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
            "tokenizer_hash": self.served.renderer.tokenizer_hash,
            "template_hash": self.served.renderer.template_hash,
            "usage": {
                "prompt": len(self.plan.prompt),
                "completion": completion,
                "cached": self.cached,
            },
            "cost": None if self.served.prices is None else self.spent(choice).money,
            "latency_us": int((ended - self.began) * 1e6),
            "ttft_us": int(((self.first or ended) - self.began) * 1e6),
            "trainable": why is None,
            "untrainable_reason": why,
            "identified_by": self.identified_by,
            "request_base": stored.base,
            "request_kept": stored.kept,
        }, breach

    def spent(self, choice: Choice) -> Spent:
        """What the record of one choice adds; the first bears the prompt."""
        prompt, cached = (len(self.plan.prompt), self.cached) if choice.index == 0 else (0, 0)
        return spent(self.served.prices, (prompt, len(choice.ids), cached))

    def _breach(self, versions: Any) -> str | None:
        if not self.granted or not len(versions):
            return None
        if (versions < 0).any():
            return "unknown_version"
        return "old_version" if (versions < self.session.start["min_version"]).any() else None

    def _why_not(self, choice: Choice) -> str | None:
        if choice.reason == ABORT:
            return "aborted"
        if not choice.ids:
            return "no_tokens"
        if self.sampling.grammar is not None:
            return "constrained"
        if self.sampling.temperature == 0:
            return "greedy"
        if not self.sampling.from_policy:
            return "altered_sampling"
        return None if all(map(math.isfinite, choice.logprobs)) else "bad_logprobs"
