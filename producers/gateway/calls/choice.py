"""One of the replies of a call, as an engine samples it.

Invariants: ids, log-probabilities and version spans are kept as the engine gave them, in its order; whether it may be
trained on is a function of what is recorded of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.dialects.conversation import Part, Text, Thinking, ToolUse, ToolUsePiece
from millrace.dialects.rendering.base import Parser, ReplyDelta
from millrace.infra.engines.base import ABORT, Chunk, LabelSpan, Sampling
from millrace.infra.process.offload import SLICE
from millrace.producers.gateway.marks import minted_call
from millrace.schemas.json_values import JsonObject


def slices(chunk: Chunk) -> Sequence[Chunk]:
    """A chunk in pieces that take little time each; only the last of them ends what the chunk ends."""
    ids, count = chunk.token_ids, len(chunk.token_ids)
    if count == 1:  # as nearly all are
        return (chunk,)
    step = max(1, SLICE // (1 + (len(chunk.tops[0]) if len(chunk.tops) else 0)))
    if count <= step:
        return (chunk,)
    out = []
    for start in range(0, count, step):
        end = start + step
        last = end >= count
        out.append(
            replace(
                chunk,
                token_ids=ids[start:end],
                logprobs=chunk.logprobs[start:end],
                tops=chunk.tops[start:end],
                finish_reason=chunk.finish_reason if last else None,
                stop_reason=chunk.stop_reason if last else None,
                spans=chunk.spans if last else (),
                usage=chunk.usage if last else None,
            )
        )
    return out


@dataclass(slots=True)
class Choice:
    """One of the replies asked for. `calls` are its tool calls as messages hold them, with the ids that were minted."""

    index: int
    parser: Parser
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    spans: tuple[LabelSpan, ...] = ()
    finish: str | None = None
    stop: str | int | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    process: int = 0
    """the index of the one that mints the ids of its calls"""
    drafts: list[ToolUsePiece] = field(default_factory=list)
    """the pieces of the call that is being sampled"""

    def feed(self, chunk: Chunk) -> list[Part]:
        """Take what the engine sampled; returns its parts: pieces of Text, Thinking and ToolUses."""
        is_last = chunk.finish_reason is not None
        at_once = is_last and not self.ids
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        if chunk.tops:
            self.tops += chunk.tops
        deltas = self.parser.whole(chunk.token_ids) if at_once else self.parser.feed(chunk.token_ids)
        if is_last:
            self.finish, self.stop, self.spans = chunk.finish_reason, chunk.stop_reason, chunk.spans
            if not at_once:
                deltas += self.parser.finish()
        return [self._part(delta) for delta in deltas]

    def _part(self, delta: ReplyDelta) -> Part:
        if delta.content and not self.drafts:  # as nearly all are
            return Text(delta.content)
        if delta.draft is not None:
            id = self.drafts[0].id if self.drafts else minted_call(self.process)
            self.drafts.append(ToolUsePiece(id, delta.draft.name, delta.draft.arguments))
            return self.drafts[-1]
        drafts, self.drafts = self.drafts, []
        if delta.call is not None:
            name, arguments = delta.call
            draft_arguments = "".join(piece.arguments for piece in drafts)
            goes_on = bool(drafts) and drafts[0].name == name and arguments.startswith(draft_arguments)
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

    def message(self) -> JsonObject:
        """The assistant message."""
        reply = self.parser.reply
        out: JsonObject = {"role": "assistant", "content": reply.content if self.calls else reply.content or ""}
        if reply.reasoning:
            out["reasoning_content"] = reply.reasoning
        if self.calls:
            out["tool_calls"] = self.calls
        return out


def bar_of(choice: Choice, sampling: Sampling) -> str | None:
    """Why a choice is never trained on, whatever its versions."""
    if choice.reason == ABORT:
        return "aborted"
    if not choice.ids:
        return "no_tokens"
    if sampling.grammar is not None:
        return "constrained"
    if sampling.temperature == 0:
        return "greedy"
    if not sampling.from_policy:
        return "altered_sampling"
    return None if all(map(math.isfinite, choice.logprobs)) else "bad_logprobs"


def breach_of(versions: NDArray[np.int32], minimum: int) -> str | None:
    """How the versions of its tokens break a grant, which bounds them from below."""
    if not len(versions):
        return None
    if (versions < 0).any():
        return "unknown_version"
    return "old_version" if (versions < minimum).any() else None
