"""One episode as the gateway knows it: who it belongs to, where its chain stands, what may continue.

Invariants: `step` and `link` only move when an event is in the capture log, so steps are dense and the chain unbroken
even over a full disk; the same folds (`session_from_start`, `follow`) build a session live and from the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from millrace.dialects.rendering.base import Message
from millrace.producers.gateway.sessions.lineage import Lineages
from millrace.producers.gateway.sessions.request_trail import RequestTrail
from millrace.producers.gateway.sessions.tool_asks import Asks
from millrace.schemas.chain import START
from millrace.schemas.ids import now_micros
from millrace.schemas.json_values import JsonObject
from millrace.schemas.records import EpisodeStarted, Event, Split


class RewardKey(NamedTuple):
    """What a reward is known by in its episode: ids of two sources never meet."""

    source: str
    id: str


@dataclass(slots=True, eq=False)
class GatewaySession:
    """One trajectory. `id` is its trajectory id; `start` is the body of its episode_started."""

    id: str
    tenant: str
    policy: str
    group: str
    root: str
    attempt: str
    split: Split
    start: EpisodeStarted
    parent: str | None = None
    spawn_call: str | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)
    step: int = 0
    link: bytes = START
    is_whole: bool = True
    gap_open: bool = False
    has_ended: bool = False
    lineages: Lineages = field(default_factory=Lineages)
    other_lineages: dict[str, Lineages] = field(default_factory=dict)
    """those of calls that other policies answered, by policy: their tokens are another model's"""
    rewards: set[RewardKey] = field(default_factory=set)
    asks: Asks = field(default_factory=Asks)
    requests: dict[str, RequestTrail] = field(default_factory=dict)
    """what its calls said already, by the policy that answered them: history is read of one policy"""
    report_numbers: dict[str, int] = field(default_factory=dict)
    """source of reports -> number from which on its events are new"""
    calls: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    digests: list[bytes] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    """ids of tool calls by which its caller is known"""
    engines: dict[str, str] = field(default_factory=dict)
    """the engine that served its newest call, by policy"""
    newest_text: str | None = None
    newest_reply: tuple[str, bytes] | None = None
    """id of its newest reply, and the digest of the conversation with it"""
    alias: str | None = None
    """the name that its caller gave the conversation"""
    subject: str = ""
    """the caller's end user, as a digest"""
    payer: str = ""
    """the name of the key that started it, which bears the calls of its own key"""
    nameless: bool = False
    """whether it began with a call that said nothing about itself"""
    began: int = field(default_factory=now_micros)
    """micros, when the episode started"""
    touched_at: float = field(default_factory=time.monotonic)
    places: list[tuple[int, int]] = field(default_factory=list)
    """where its entries lie in the capture log"""

    @property
    def has_grant(self) -> bool:
        """Whether a grant asked for this episode, so that its versions are bounded."""
        return self.start["ticket"] is not None

    @property
    def key(self) -> str:
        """The key of its events."""
        return f"{self.tenant}/{self.group}"

    @property
    def busy(self) -> bool:
        """Whether a call is in flight."""
        return bool(self.calls)

    @property
    def origin(self) -> dict[str, str]:
        """What the start says of the caller beside its event: headers that stay in the capture log."""
        nameless = "1" if self.nameless else ""
        notes = {"_name": self.alias or "", "_subject": self.subject, "_nameless": nameless, "_payer": self.payer}
        return {name: value for name, value in notes.items() if value}

    def is_silent(self, timeout_s: float) -> bool:
        """Whether nothing happened for so long, and nothing does."""
        return not self.busy and self.touched_at < time.monotonic() - timeout_s

    @property
    def turns(self) -> int:
        """Those of all policies, which are counted together."""
        return max(lineages.turns for lineages in (self.lineages, *self.other_lineages.values()))

    def lineages_of(self, policy: str) -> Lineages:
        """The token traces of a policy in this session. Ask for them anew before each use."""
        lineages = self.lineages if policy == self.policy else self.other_lineages.setdefault(policy, Lineages())
        lineages.turns = self.turns
        return lineages

    def said_before(self, policy: str) -> RequestTrail:
        """What calls that a policy answered said in this session."""
        return self.requests.setdefault(policy, RequestTrail())

    def stand(self, policy: str) -> tuple[Lineages, int]:
        """Differs as soon as another call of the policy was folded: what was placed before it may lie elsewhere now."""
        lineages = self.lineages_of(policy)
        return lineages, lineages.folded

    def touch(self) -> None:
        """The episode is alive."""
        self.touched_at = time.monotonic()

    def follow(self, kind: str, step: int, link: bytes) -> None:
        """An event of this trajectory is in the log."""
        self.step, self.link = step + 1, link
        if kind == "gap":
            self.is_whole = False
        elif kind == "episode_ended":
            self.has_ended = True

    def forget(self) -> None:
        """Its tokens are not known any more: the next call opens a lineage. Turns are counted on."""
        turns, self.lineages, self.other_lineages = self.turns, Lineages(), {}
        self.lineages.turns = turns

    def shrink(self) -> None:
        """Keep only what a late reward needs."""
        self.lineages, self.other_lineages = Lineages(), {}
        self.asks = Asks()
        self.requests = {}
        self.report_numbers = {}
        self.digests.clear()
        self.call_ids.clear()
        self.start = {**self.start, "task": ""}
        self.newest_text = self.newest_reply = None


def session_from_start(event: Event, body: EpisodeStarted, headers: Mapping[str, str]) -> GatewaySession:
    """The session that an episode_started event begins; `headers` are those of its entry."""
    return GatewaySession(
        id=event["trajectory"],
        tenant=event["tenant"],
        policy=event["policy"],
        group=event["group"],
        root=event["root_trajectory"],
        attempt=event["attempt"],
        split=event["split"],
        start=body,
        parent=event["parent_trajectory"],
        spawn_call=event["spawn_call"],
        alias=headers.get("_name"),
        subject=headers.get("_subject", ""),
        nameless="_nameless" in headers,
        payer=headers.get("_payer", ""),
        began=event["capture_time"],
    )


def to_reply(message: Message) -> Message:
    """The assistant message of a response as the lineages keep it."""
    out: JsonObject = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("tool_calls"):
        out["tool_calls"] = message["tool_calls"]
    if message.get("reasoning_content"):
        out["reasoning_content"] = message["reasoning_content"]
    return out
