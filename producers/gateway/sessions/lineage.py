"""Which stored tokens a call goes on from: the lineages of one session.

A lineage is one physical token trace: a prompt, a reply as sampled, what came between, the next reply, and so on. A
node is a place right behind a reply where the conversation may go on.

Invariants: a call extends a lineage only from its tip, except that a retry of the newest call cuts that call's reply
off; everything else opens a lineage of its own, with the reason; stored ids are never tokenized again; an aborted reply
is recorded but nothing ever continues from it; a caller that proved nothing about itself is never given tokens that it
could not have read. The same `apply` folds a call when it happens and when the session is rebuilt from the capture log.

A plan is made in two steps: `open` decides on the event loop where a call begins, `write` makes its prompt, which may
take long and touches nothing but the plan, so that it may run in another thread."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from millrace.dialects import match_keys
from millrace.dialects.rendering.base import NO_OPTIONS, RAW, Message, NoContinuation, Options, Renderer, Tools
from millrace.infra.engines.base import ABORT
from millrace.infra.errors import GatewayError
from millrace.schemas.arrays import unpack
from millrace.schemas.ids import new_id
from millrace.schemas.records import ModelCall

ITEM = array("i").itemsize
MOST_RAW = 16
"""lineages of prompts that no template wrote, of one session, that may be gone on with"""


@dataclass(slots=True, eq=False)
class Node:
    """Right behind a reply: `length` tokens of its lineage, `count` messages, the reply's text and response id.

    `before` is the node that the call of this reply went on from."""

    lineage: KnownLineage
    length: int
    count: int
    text: str
    response: str
    before: Node | None


@dataclass(slots=True, eq=False)
class KnownLineage:
    """One token trace and the messages behind it, as this gateway knows them."""

    id: str
    tokens: array[int] = field(default_factory=lambda: array("i"))
    messages: list[Message] = field(default_factory=list)
    tip: Node | None = None
    options: Options = field(default_factory=dict)
    """what its requests say to the chat template"""


@dataclass(slots=True, eq=False)
class ServedCall:
    """A request that was served: its newest response, where its prompt ends, and the node behind its reply, if any."""

    response: str
    turn: int
    length: int = 0
    node: Node | None = None


@dataclass(slots=True)
class CallStart:
    """How a call begins. `keep` tokens of `lineage` are its prefix; `prompt` is the whole prompt, once it is written.

    `past_tokens` and `past` are the tokens and messages that `write` may go on from, behind `tip`; `newest_messages`
    are those that it compares with where there are none; `tips` are replies, with all tokens up to their ends, that a
    prompt which no template writes may go on from; `prompt_bytes` is the prompt as records hold it."""

    messages: list[Message]
    digests: list[bytes]
    hash: bytes
    turn: int
    prompt: list[int]
    keep: int = 0
    lineage: KnownLineage | None = None
    tip: Node | None = None
    opening: str | None = None
    supersedes: str | None = None
    former: ServedCall | None = None
    past_tokens: list[int] = field(default_factory=list)
    past: list[Message] = field(default_factory=list)
    newest_messages: list[Message] | None = None
    tips: list[tuple[Node, array[int]]] = field(default_factory=list)
    prompt_bytes: bytes = b""
    options: Options = field(default_factory=dict)

    @property
    def weight(self) -> int:
        """Bytes, roughly, that `write` reads beside the request."""
        return ITEM * sum(len(tokens) for _, tokens in self.tips)


class Placement(TypedDict):
    """Where a choice of a call stands; `prompt`: int32, packed, what follows the first `prefix_len` tokens."""

    lineage: str
    opened: str | None
    prefix_len: int
    prompt: bytes


class Lineages:
    """The token traces of one session."""

    def __init__(self) -> None:
        self._lineages: dict[str, KnownLineage] = {}
        self._nodes: dict[bytes, Node] = {}
        self._raw: OrderedDict[str, Node] = OrderedDict()
        """replies to prompts that no template wrote, by their lineages, the newest last"""
        self._asked: dict[bytes, ServedCall] = {}
        self._newest: KnownLineage | None = None
        self.turns = 0
        self.folded = 0
        """calls that `apply` was given"""

    def open(
        self,
        messages: list[Message],
        digests: list[bytes],
        hash: bytes,
        response: str,
        *,
        proven: bool = True,
        options: Options = NO_OPTIONS,
    ) -> CallStart:
        """Where a call with these messages begins. Notes that `response` will answer it.

        `options`: what it says to the chat template. `proven`: whether the caller is known to be the one whose replies
        are kept here."""
        former = self._asked.get(hash)
        turn = former.turn if former else self.turns
        plan = CallStart(
            messages, digests, hash, turn, [], supersedes=former.response if former else None, former=former
        )
        plan.options = options
        self._place(plan, former, proven)
        self._asked[hash] = ServedCall(response, turn)
        self.turns += former is None
        return plan

    def _place(self, plan: CallStart, former: ServedCall | None, proven: bool) -> None:
        if former is not None and former.node is not None and former.node.lineage.tip is former.node:
            plan.lineage, plan.tip, plan.keep = former.node.lineage, former.node, former.length
            plan.prompt = plan.lineage.tokens[: plan.keep].tolist()
            return
        if _raw(plan.messages):
            plan.tips = [
                (node, node.lineage.tokens[: node.length]) for node in self._raw.values() if node.lineage.tip is node
            ]
            plan.opening = (
                "its prompt begins with no earlier one and its reply" if self._raw else "it is the first call"
            )
            return
        node = self._match(plan.messages, plan.digests)
        if node is None:
            plan.newest_messages = [] if self._newest is None else self._newest.messages
            plan.opening = "it is the first call" if self._newest is None else None
        elif node.lineage.tip is not node:
            plan.opening = "it branches off an earlier reply"
        elif not proven and _hides(node.lineage.messages[: node.count], plan.messages):
            plan.opening = "the caller has no name and did not echo the thoughts"
        else:
            plan.tip = node
            plan.past_tokens = node.lineage.tokens[: node.length].tolist()
            plan.past = node.lineage.messages[: node.count]

    @staticmethod
    def write(plan: CallStart, tools: Tools, renderer: Renderer, prompt: str | Sequence[int] | None = None) -> None:
        """Make the prompt of a plan; `prompt`: the one that no template writes. Raises RenderError; the plan is to be
        withdrawn then."""
        if not plan.prompt and prompt is not None:
            Lineages._write_raw(plan, prompt, renderer)
        elif not plan.prompt:
            Lineages._write(plan, tools, renderer)
        plan.prompt_bytes = array("i", plan.prompt).tobytes()

    @staticmethod
    def _write(plan: CallStart, tools: Tools, renderer: Renderer) -> None:
        if plan.newest_messages is not None:
            plan.opening = plan.opening or _why(plan.newest_messages, plan.messages)
        if plan.tip is not None and renderer.reads(plan.options) != renderer.reads(plan.tip.lineage.options):
            plan.tip, plan.opening = None, "the options of the chat template changed"
        if plan.tip is not None:
            between = renderer.bridge(plan.past_tokens, plan.past, plan.messages[plan.tip.count :], tools, plan.options)
            if not isinstance(between, NoContinuation):
                plan.lineage, plan.keep = plan.tip.lineage, plan.tip.length
                plan.prompt = plan.past_tokens + between
                return
            plan.tip, plan.opening = None, between.reason
        plan.prompt = renderer.render(plan.messages, tools, plan.options)

    @staticmethod
    def _write_raw(plan: CallStart, prompt: str | Sequence[int], renderer: Renderer) -> None:
        """A prompt that begins with all the tokens of an earlier one and its reply goes on from them as they were
        sampled, however text would be tokenized again; of several such the longest."""
        if not isinstance(prompt, str):
            renderer.decode(prompt)
        for node, tokens in sorted(plan.tips, key=lambda tip: len(tip[1]), reverse=True):
            rest: list[int] | None = None
            if not isinstance(prompt, str):
                if len(tokens) <= len(prompt) and list(prompt[: len(tokens)]) == tokens.tolist():
                    rest = list(prompt[len(tokens) :])
            elif prompt.startswith(text := renderer.decode(tokens)):
                rest = renderer.encode(prompt[len(text) :])
            if rest is not None:
                plan.lineage, plan.tip, plan.keep, plan.opening = node.lineage, node, node.length, None
                plan.prompt = tokens.tolist() + rest
                return
        plan.prompt = renderer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def withdraw(self, plan: CallStart) -> None:
        """The call failed before it had a single token: as if it had never been made."""
        if plan.former is not None:
            self._asked[plan.hash] = plan.former
        else:
            self._asked.pop(plan.hash, None)

    def former(self, hash: bytes) -> ServedCall | None:
        """The call of this request that was served last."""
        return self._asked.get(hash)

    def note_answer(self, hash: bytes, response: str, turn: int) -> None:
        """A request was answered by who gives no tokens to go on from."""
        self._asked[hash] = ServedCall(response, turn)

    def placement(self, plan: CallStart, choice: int, n: int) -> Placement:
        """Where a choice of a call, which has its reply now, stands."""
        lineage, opening = plan.lineage, plan.opening
        if choice:
            lineage, opening = None, f"it is choice {choice} of {n}"
        elif lineage is not None and lineage.tip is not plan.tip:
            tip = lineage.tip
            if tip is None or plan.supersedes is None or tip.response != plan.supersedes:
                lineage, opening = None, "another call went on from the same reply"
        if lineage is None:
            return {"lineage": new_id(), "opened": opening, "prefix_len": 0, "prompt": plan.prompt_bytes}
        prompt = plan.prompt_bytes[plan.keep * ITEM :]
        return {"lineage": lineage.id, "opened": None, "prefix_len": plan.keep, "prompt": prompt}

    def apply(
        self,
        call: ModelCall,
        messages: Sequence[Message],
        digests: Sequence[bytes],
        hash: bytes,
        reply: Message,
        options: Options = NO_OPTIONS,
    ) -> bytes | None:
        """Fold a recorded ModelCall. Returns the digest under which the conversation goes on, if it can."""
        self.folded += 1
        lineage = self._lineages.setdefault(call["lineage"], KnownLineage(call["lineage"]))
        tokens, keep = lineage.tokens, call["prefix_len"]
        if not 0 <= keep <= len(tokens):
            raise GatewayError(f"{call['response_id']} goes on from {keep} tokens, of which {len(tokens)} are known")
        while lineage.tip is not None and lineage.tip.length > keep:
            lineage.tip = lineage.tip.before
        del tokens[keep:]
        tokens.frombytes(unpack(call["prompt_ids"]).astype(np.int32).tobytes())
        length = len(tokens)
        served_call = self._asked.get(hash)
        if served_call is None or served_call.response != call["response_id"]:
            turn = call["turn"]
            self.turns = max(self.turns, turn + 1)
            served_call = self._asked[hash] = ServedCall(call["response_id"], turn)
        self._newest, lineage.options = lineage, options
        if call["finish_reason"] == ABORT:
            return None
        tokens.frombytes(unpack(call["output_ids"]).astype(np.int32).tobytes())
        past = lineage.messages[: len(messages)]
        lineage.messages = [*past, *messages[len(past) :], reply]
        node = Node(lineage, len(tokens), len(lineage.messages), reply["content"], call["response_id"], lineage.tip)
        lineage.tip = node
        if call["choice"] == 0:
            served_call.length, served_call.node = length, node
        digest = match_keys.extend(digests[-1], reply)
        if _raw(messages):
            self._raw[lineage.id] = node
            self._raw.move_to_end(lineage.id)
            while len(self._raw) > MOST_RAW:
                self._raw.popitem(last=False)
        else:
            self._nodes[digest] = node
        return digest

    def _match(self, messages: Sequence[Message], digests: Sequence[bytes]) -> Node | None:
        """The node behind the last reply of this session that the messages echo."""
        for count in range(len(messages), 0, -1):
            if messages[count - 1]["role"] != "assistant":
                continue
            node = self._nodes.get(digests[count])
            if node is not None and match_keys.same_text(node.text, messages[count - 1]["content"]):
                return node
        return None


def _raw(messages: Sequence[Message]) -> bool:
    """Whether they are a prompt that no template writes."""
    return len(messages) == 1 and RAW in messages[0]


def _why(newest_messages: Sequence[Message], messages: Sequence[Message]) -> str:
    """Why no node matched, compared with the messages of the newest lineage."""
    for at, (newest_message, message) in enumerate(zip(newest_messages, messages, strict=False)):
        if newest_message != message and match_keys.message_key(newest_message) != match_keys.message_key(message):
            return f"message {at} ({message['role']}) differs from what was known"
    if len(messages) < len(newest_messages):
        return "it leaves earlier messages out"
    return "the tools changed" if newest_messages else "the former reply was cut off"


def _hides(stored_messages: Sequence[Message], echoed_messages: Sequence[Message]) -> bool:
    """Whether the stored replies hold thoughts that the echo does not show."""
    return any(
        (stored_message.get("reasoning_content") or "").strip()
        != (echoed_message.get("reasoning_content") or "").strip()
        for stored_message, echoed_message in zip(stored_messages, echoed_messages, strict=False)
        if stored_message.get("reasoning_content")
    )
