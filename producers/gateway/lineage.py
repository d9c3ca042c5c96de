"""Which stored tokens a call goes on from: the lineages of one session.

A lineage is one physical token trace: a prompt, a reply as sampled, what came between, the next reply, and so on. A
node is a place right behind a reply where the conversation may go on.

Invariants: a call extends a lineage only from its tip, except that a retry of the newest call cuts that call's reply
off; everything else opens a lineage of its own, with the reason; stored ids are never tokenized again; an aborted reply
is recorded but nothing ever continues from it. The same `apply` folds a call when it happens and when the session is
rebuilt from the capture log."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from producers.gateway import keys
from producers.gateway.rendering.base import Message, Refusal, Renderer, Tools
from schemas.arrays import unpack
from schemas.ids import new_id

ABORT = "abort"


@dataclass(slots=True, eq=False)
class Node:
    """Right behind a reply: `length` tokens of its lineage, `count` messages, the reply's text and response id.

    `before` is the node that the call of this reply went on from."""

    lineage: Lineage
    length: int
    count: int
    text: str
    response: str
    before: Node | None


@dataclass(slots=True, eq=False)
class Lineage:
    """One token trace and the messages behind it, as this gateway knows them."""

    id: str
    tokens: array[int] = field(default_factory=lambda: array("i"))
    messages: list[Message] = field(default_factory=list)
    tip: Node | None = None


@dataclass(slots=True, eq=False)
class Asked:
    """A request that was served: its newest response, where its prompt ends, and the node behind its reply, if any."""

    response: str
    turn: int
    length: int = 0
    node: Node | None = None


@dataclass(slots=True)
class Plan:
    """How a call begins. `keep` tokens of `lineage` are its prefix; `prompt` is the whole prompt."""

    messages: list[Message]
    digests: list[bytes]
    hash: bytes
    turn: int
    prompt: list[int]
    keep: int = 0
    lineage: Lineage | None = None
    tip: Node | None = None
    opened: str | None = None
    supersedes: str | None = None
    former: Asked | None = None


class Lineages:
    """The token traces of one session."""

    def __init__(self) -> None:
        self._lineages: dict[str, Lineage] = {}
        self._nodes: dict[bytes, Node] = {}
        self._asked: dict[bytes, Asked] = {}
        self._newest: Lineage | None = None
        self.turns = 0

    def knows(self, digest: bytes) -> bool:
        """Whether a conversation with this digest ends with a reply of this session."""
        return digest in self._nodes

    def plan(
        self,
        messages: list[Message],
        digests: list[bytes],
        hash: bytes,
        tools: Tools,
        renderer: Renderer,
        response: str,
    ) -> Plan:
        """Where a call with these messages begins. Notes that `response` will answer it. Raises RenderError."""
        former = self._asked.get(hash)
        turn = former.turn if former else self.turns
        plan = Plan(messages, digests, hash, turn, [], supersedes=former.response if former else None, former=former)
        self._fill(plan, former, tools, renderer)
        self._asked[hash] = Asked(response, turn)
        self.turns += former is None
        return plan

    def _fill(self, plan: Plan, former: Asked | None, tools: Tools, renderer: Renderer) -> None:
        if former is not None and former.node is not None and former.node.lineage.tip is former.node:
            plan.lineage, plan.tip, plan.keep = former.node.lineage, former.node, former.length
            plan.prompt = plan.lineage.tokens[: plan.keep].tolist()
            return
        node = self._match(plan.messages, plan.digests)
        if node is None:
            plan.opened = self._why(plan.messages, plan.digests)
        elif node.lineage.tip is not node:
            plan.opened = "it branches off an earlier reply"
        else:
            stored = node.lineage.tokens[: node.length].tolist()
            past, new = node.lineage.messages[: node.count], plan.messages[node.count :]
            between = renderer.bridge(stored, past, new, tools)
            if not isinstance(between, Refusal):
                plan.lineage, plan.tip, plan.keep = node.lineage, node, node.length
                plan.prompt = stored + between
                return
            plan.opened = between.reason
        plan.prompt = renderer.render(plan.messages, tools)

    def withdraw(self, plan: Plan) -> None:
        """The call failed before it had a single token: as if it had never been made."""
        if plan.former is not None:
            self._asked[plan.hash] = plan.former
        else:
            self._asked.pop(plan.hash, None)

    def placed(self, plan: Plan, choice: int, n: int) -> dict[str, Any]:
        """The fields lineage, opened, prefix_len and prompt of a call that has its reply now."""
        lineage, opened = plan.lineage, plan.opened
        if choice:
            lineage, opened = None, f"it is choice {choice} of {n}"
        elif lineage is not None and lineage.tip is not plan.tip:
            tip = lineage.tip
            if tip is None or plan.supersedes is None or tip.response != plan.supersedes:
                lineage, opened = None, "another call went on from the same reply"
        if lineage is None:
            return {"lineage": new_id(), "opened": opened, "prefix_len": 0, "prompt": plan.prompt}
        return {"lineage": lineage.id, "opened": None, "prefix_len": plan.keep, "prompt": plan.prompt[plan.keep :]}

    def apply(
        self,
        call: Mapping[str, Any],
        messages: Sequence[Message],
        digests: Sequence[bytes],
        hash: bytes,
        reply: Message,
    ) -> bytes | None:
        """Fold a recorded ModelCall. Returns the digest under which the conversation goes on, if it can."""
        lineage = self._lineages.setdefault(call["lineage"], Lineage(call["lineage"]))
        tokens, keep = lineage.tokens, call["prefix_len"]
        while lineage.tip is not None and lineage.tip.length > keep:
            lineage.tip = lineage.tip.before
        del tokens[keep:]
        tokens.frombytes(unpack(call["prompt_ids"]).astype(np.int32).tobytes())
        length = len(tokens)
        asked = self._asked.get(hash)
        if asked is None or asked.response != call["response_id"]:
            turn = call["turn"]
            self.turns = max(self.turns, turn + 1)
            asked = self._asked[hash] = Asked(call["response_id"], turn)
        self._newest = lineage
        if call["finish_reason"] == ABORT:
            return None
        tokens.frombytes(unpack(call["output_ids"]).astype(np.int32).tobytes())
        past = lineage.messages[: len(messages)]
        lineage.messages = [*past, *messages[len(past) :], reply]
        node = Node(lineage, len(tokens), len(lineage.messages), reply["content"], call["response_id"], lineage.tip)
        lineage.tip = node
        if call["choice"] == 0:
            asked.length, asked.node = length, node
        digest = keys.extend(digests[-1], reply)
        self._nodes[digest] = node
        return digest

    def _match(self, messages: Sequence[Message], digests: Sequence[bytes]) -> Node | None:
        """The node behind the last reply of this session that the messages echo."""
        for count in range(len(messages), 0, -1):
            if messages[count - 1]["role"] != "assistant":
                continue
            node = self._nodes.get(digests[count])
            if node is not None and keys.same_text(node.text, messages[count - 1]["content"]):
                return node
        return None

    def _why(self, messages: Sequence[Message], digests: Sequence[bytes]) -> str:
        """Why no node matched, compared with the newest lineage."""
        if self._newest is None:
            return "it is the first call"
        known = self._newest.messages
        for at, (ours, theirs) in enumerate(zip(known, messages, strict=False)):
            if keys.message_key(ours) != keys.message_key(theirs):
                return f"message {at} ({theirs['role']}) differs from what was known"
        if len(messages) < len(known):
            return "it leaves earlier messages out"
        return "the tools changed" if known else "the former reply was cut off"
