"""One call on its way, whoever answers it: the seam between the one pipeline of calls and those who answer them.

A sibling is a `Call`: of an engine of ours (`calls/engine_call.py`), of an upstream (`upstreams/upstream_call.py`). It
asks, reads, and says what each choice of the answer was; `CallPipeline` streams, marks, records and aborts.

Invariants: a call records nothing itself; `break_off` and `records` of it can be used at any time, also before anything
was answered; what `model_call` writes is the same whoever answered, but for what that one knows of tokens."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.dialects.base import Dialect
from millrace.dialects.rendering.base import Message
from millrace.infra.engines.upstream import UNTRAINABLE
from millrace.producers.gateway.prices import Usage
from millrace.producers.gateway.sessions.reply_index import ChoiceExchange, ChoiceReply
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.schemas.arrays import empty_array
from millrace.schemas.ids import new_id, now_micros
from millrace.schemas.records import Array, EngineShare, ModelCall
from millrace.schemas.records import Sampling as SamplingRecord
from millrace.schemas.requests import RequestOutline


class WholeReply(NamedTuple):
    """An answer as its client gets it. `headers`: those of an upstream; None for an answer that is made here."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] | None = None


class TokenTrace(NamedTuple):
    """The exact tokens of a choice, and where they stand in the lineages of its session."""

    lineage: str
    opening: str | None
    prefix_len: int
    prompt: Array
    output: Array
    logprobs: Array
    versions: Array


class AnsweredBy(NamedTuple):
    """Who answered, as records name it."""

    kind: str
    address: str
    incarnation: str = ""
    tokenizer_hash: str = ""
    template_hash: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Call(ABC):
    """One of them. `name`: by which it is marked, and ends with its session."""

    session: GatewaySession
    dialect: Dialect
    body: bytes
    outline: RequestOutline | None
    identified_by: str
    """what put it into its session"""
    payer: str = ""
    """the name of the key that bears it"""
    name: str = field(default_factory=new_id)
    began: float = field(default_factory=time.perf_counter)
    when: int = field(default_factory=now_micros)
    first: float | None = None
    """when the first of its answer came"""
    is_marked: bool = False
    """whether it is marked as under way"""
    is_lost: bool = False
    """whether a record of it could not be written"""

    # ------------------------------------------------------------------ what it is

    @property
    @abstractmethod
    def streams(self) -> bool:
        """Whether its client asked for a stream."""

    @property
    @abstractmethod
    def policy(self) -> str:
        """Whose reply it is. An episode of another policy has it in its history, and never trains on it."""

    @property
    @abstractmethod
    def is_answered(self) -> bool:
        """Whether anything of an answer came: what fails before leaves no trace."""

    @property
    @abstractmethod
    def messages(self) -> Sequence[Message]:
        """Those of its request."""

    @property
    @abstractmethod
    def digests(self) -> Sequence[bytes]:
        """Of its conversation, one a message."""

    @property
    @abstractmethod
    def replaces(self) -> str | None:
        """The response that its client got to the same request before."""

    # ------------------------------------------------------------------ its answer

    @abstractmethod
    async def answer(self) -> WholeReply:
        """The whole answer. Raises ApiError."""

    async def open(self) -> WholeReply | None:
        """Ask for a stream: None, or a refusal. Raises ApiError."""
        return None

    def stream_head(self) -> WholeReply | None:
        """Status and headers of a stream that is open, whose bytes go on as they are; None for one made here."""
        return None

    @abstractmethod
    def pieces(self) -> AsyncGenerator[bytes, None]:
        """The stream, but for what ends it. Raises ApiError."""

    @abstractmethod
    async def close(self) -> None:
        """The stream came to its end: make what its records need. Raises ApiError for a reply that is not told."""

    @abstractmethod
    def rest(self) -> bytes:
        """What came and is not told yet of a stream that failed."""

    @abstractmethod
    def end(self) -> bytes:
        """What ends a stream."""

    @abstractmethod
    def break_off(self, *, is_unread: bool) -> None:
        """Nobody waits for the answer any more. `is_unread`: its client got nothing of it."""

    def let_go(self) -> None:
        """Its stream is over: nothing may keep it in memory until the garbage collector comes."""
        return

    def check(self) -> None:
        """Raises ApiError for a whole answer that is recorded and not told."""
        return

    # ------------------------------------------------------------------ its records

    @abstractmethod
    def unreadable(self) -> str | None:
        """Why nothing of the answer can be recorded but that it came."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many choices are recorded."""

    @abstractmethod
    def spending(self, at: int) -> dict[str, str]:
        """The headers of the first thing that is recorded of a choice: who pays what."""

    @abstractmethod
    def reply(self, at: int) -> ChoiceReply:
        """What a choice said."""

    @abstractmethod
    def record(self, at: int, reply: ChoiceReply) -> tuple[ModelCall, str | None]:
        """The ModelCall body of a choice, and why its versions break a grant (None when they do not)."""

    @abstractmethod
    def size(self, reply: ChoiceReply) -> int:
        """Roughly how many bytes a record has."""

    def fold(self, body: ModelCall, reply: ChoiceReply) -> None:
        """A record is about to be written: its session knows its tokens, as a start makes it know them."""
        return

    def forget(self) -> None:
        """A choice cannot be recorded."""
        return

    def distrust(self) -> None:
        """Who answered did so with another version than it said."""
        return

    def exchange(self, reply: ChoiceReply) -> ChoiceExchange:
        """What was asked, with one choice of the answer."""
        return ChoiceExchange(self.policy, self.messages, self.outline, self.replaces, reply, self.when, now_micros())

    def note(self, choice: ChoiceReply, at: int) -> None:
        """A choice is recorded: for telemetry."""
        return

    def gaps(self) -> list[str]:
        """What else of the answer is missing from the log, and why."""
        return []


def model_call(
    call: Call,
    reply: ChoiceReply,
    by: AnsweredBy,
    *,
    turn: int,
    usage: Usage,
    cost: float | None,
    sampling: SamplingRecord,
    call_id: str = "",
    opening: str = UNTRAINABLE,
    trace: TokenTrace | None = None,
    stop: str | None = None,
    bar: str | None = UNTRAINABLE,
    earlier_engines: Sequence[EngineShare] = (),
) -> ModelCall:
    """The body of a record. `usage`: (prompt, completion, cached) tokens; `trace`: None where nobody knows the tokens;
    `bar`: why it is never trained on, None where it may be; `earlier_engines`: those that sampled the first tokens,
    before `by` went on."""
    now = time.perf_counter()
    if trace is None:
        trace = TokenTrace(
            new_id(),
            opening,
            0,
            empty_array("int32"),
            empty_array("int32"),
            empty_array("float32"),
            empty_array("int32"),
        )
    stored_request = call.session.said_before(call.policy).compress(call.body, call.outline)
    return {
        "call_id": call_id or new_id(),
        "response_id": reply.id,
        "choice": reply.choice,
        "lineage": trace.lineage,
        "opened": trace.opening,
        "supersedes": call.replaces,
        "turn": turn,
        "prefix_len": trace.prefix_len,
        "prompt_ids": trace.prompt,
        "output_ids": trace.output,
        "output_logprobs": trace.logprobs,
        "output_versions": trace.versions,
        "request": stored_request.request,
        "response": reply.response,
        "sampling": sampling,
        "finish_reason": reply.finish,
        "stop_condition": stop,
        "engine": by.kind,
        "engine_version": by.address,
        "engine_incarnation": by.incarnation,
        "tokenizer_hash": by.tokenizer_hash,
        "template_hash": by.template_hash,
        "usage": {"prompt": usage[0], "completion": usage[1], "cached": usage[2]},
        "cost": cost,
        "latency_us": int((now - call.began) * 1e6),
        "ttft_us": int(((call.first or now) - call.began) * 1e6),
        "trainable": bar is None,
        "untrainable_reason": bar,
        "identified_by": call.identified_by,
        "request_base": stored_request.base,
        "request_kept": stored_request.overlap,
        "earlier_engines": list(earlier_engines),
    }
