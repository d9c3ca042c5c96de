"""Builders of events: episodes as a gateway writes them, with dense steps and true chains.

    episode = Episode("episode-1", task='{"answer": "12"}', clock=lambda: 1_000)
    events = [episode.start(), episode.call("reply-1"), episode.end(output="12"), episode.reward(1.0)]

Invariants: the same arguments in the same order give the same bytes; every event is one that refine lets pass, unless a
field is given another value."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import orjson

from millrace.schemas import arrays, codec, envelope
from millrace.schemas.chain import START
from millrace.schemas.envelope import Belonging, ChainLink, EventNumber
from millrace.schemas.records import (
    EpisodeEnded,
    EpisodeStarted,
    Event,
    EventKind,
    ModelCall,
    Reward,
    Sampling,
    Usage,
    Versions,
)

VERSIONS: Versions = {
    "agent": "test",
    "harness": "test",
    "prompt": "1",
    "tools": {},
    "memory": "",
    "retrieval": "",
    "guardrail": "",
}
SAMPLING: Sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 16, "seed": None, "stop": [], "n": 1}
USAGE: Usage = {"prompt": 3, "completion": 2, "cached": 0}
Status: TypeAlias = Literal["completed", "failed", "truncated", "aborted", "abandoned"]
NO_FIELDS: Mapping[str, object] = {}


def stable_id(*parts: object) -> str:
    """A stable id."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join(map(str, parts))))


def model_call(
    response: str,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (4, 5),
    version: int | Sequence[int] = 0,
    keep: int = 0,
    lineage: str = "l0",
    supersedes: str | None = None,
    trainable: bool = True,
    request: bytes = b'{"messages":[]}',
    reply: bytes = b"{}",
    text: str = "",
) -> ModelCall:
    """The body of a model call, all its tokens sampled with log-probability -0.5. `text`: what a user says in its
    request."""
    versions = [version] * len(output) if isinstance(version, int) else list(version)
    return {
        "call_id": f"call-{response}",
        "response_id": response,
        "choice": 0,
        "lineage": lineage,
        "opened": "first" if keep == 0 else None,
        "supersedes": supersedes,
        "turn": 0,
        "prefix_len": keep,
        "prompt_ids": arrays.pack(np.array(prompt, np.int32)),
        "output_ids": arrays.pack(np.array(output, np.int32)),
        "output_logprobs": arrays.pack(np.full(len(output), -0.5, np.float32)),
        "output_versions": arrays.pack(np.array(versions, np.int32)),
        "request": chat_request(text) if text else request,
        "response": reply,
        "sampling": SAMPLING,
        "finish_reason": "stop",
        "stop_condition": None,
        "engine": "test",
        "engine_version": "1",
        "engine_incarnation": "e0",
        "tokenizer_hash": "t",
        "template_hash": "c",
        "usage": USAGE,
        "cost": None,
        "latency_us": 10,
        "ttft_us": 5,
        "trainable": trainable,
        "untrainable_reason": None if trainable else "text only",
        "identified_by": None,
        "request_base": None,
        "request_kept": {},
        "earlier_engines": [],
    }


def chat_request(text: str) -> bytes:
    """A chat request with one user message."""
    return orjson.dumps({"messages": [{"role": "user", "content": text}]})


def reward_body(target: str, value: float | None, *, n: int = 0, **fields: Any) -> Reward:
    """The body of a reward, of a trajectory unless `fields` say otherwise; without a value it failed by `timeout`. `n`
    tells several of one source apart."""
    body: Reward = {
        "reward_id": stable_id("reward", target, fields.get("source", "verifier"), n),
        "target_kind": "trajectory",
        "target": target,
        "span_start": None,
        "span_end": None,
        "source": "verifier",
        "source_version": "1",
        "rubric_version": "1",
        "value": value,
        "components": {},
        "label": None,
        "failure": None if value is not None else "timeout",
        "critique": None,
        "supersedes": None,
        "independent": True,
        "observed_at": 0,
        "replay": None,
        "signal": None,
        "confidence": None,
    }
    return cast(Reward, {**body, **fields})


class Episode:
    """One run of an agent at a task. Each method gives the next event; `root` is the episode's id."""

    def __init__(
        self,
        root: str,
        *,
        tenant: str = "local",
        policy: str = "p",
        group: str | None = None,
        ticket: int | None = None,
        size: int = 1,
        sample: int = 0,
        attempt: str = "a0",
        min_version: int = 0,
        deadline: int | None = None,
        awaits: Sequence[str] = ("verifier",),
        wait_ms: int = 5_000,
        split: Literal["train", "evaluation"] = "train",
        source: str = "gateway-0",
        task: str = "{}",
        task_id: str = "task",
        trajectory: str | None = None,
        clock: Callable[[], int] = lambda: 1,
    ) -> None:
        self.root, self.trajectory = root, trajectory or root
        self.tenant, self.policy, self.split, self.source = tenant, policy, split, source
        self.group = group if group is not None else (str(ticket) if ticket is not None else root)
        self.attempt, self.awaits, self.task, self.task_id = attempt, list(awaits), task, task_id
        self.clock = clock
        self.step, self.hash, self.numbers = 0, START, 0
        self._start: EpisodeStarted = {
            "task_id": task_id,
            "task": task,
            "ticket": ticket,
            "group_size": size,
            "sample": sample,
            "min_version": min_version,
            "deadline": deadline,
            "awaits": self.awaits,
            "reward_deadline_ms": wait_ms,
            "mode": "online",
            "versions": VERSIONS,
            "budget": {},
            "replay": None,
        }

    @property
    def key(self) -> str:
        """The key of its records on `raw` and `events`."""
        return f"{self.tenant}/{self.group}"

    def event(
        self, kind: EventKind, content: Mapping[str, object], *, judge: str | None = None, **fields: Any
    ) -> Event:
        """The next event, of any kind; a judge's event has no step, number or chain."""
        after = ChainLink() if judge else ChainLink(self.step, self.hash)
        belonging = Belonging(
            self.tenant, self.policy, self.group, self.root, self.trajectory, self.attempt, self.split
        )
        draft = envelope.draft(
            belonging,
            kind,
            codec.encode_by_name(codec.BODIES[kind], content),
            id=stable_id(self.trajectory, judge or "", after.step, kind, content.get("reward_id", "")),
            actor="evaluator" if judge else "gateway",
            number=EventNumber(judge or self.source, 0, None if judge else self.numbers),
            after=after,
            event_time=self.clock(),
            capture_time=self.clock(),
        )
        event = envelope.link(cast(Event, {**draft, **fields}))
        if not judge:
            self.step, self.hash, self.numbers = after.step + 1, event["hash"], self.numbers + 1
        return event

    def start(self) -> Event:
        """The episode begins."""
        return self.event("episode_started", self._start)

    def call(self, response: str, *, changed: Mapping[str, object] = NO_FIELDS, **fields: Any) -> Event:
        """The policy is called; `fields` are those of `model_call`, `changed` any fields of the record."""
        return self.event("model_call", {**model_call(response, **fields), **changed})

    def end(self, status: Status = "completed", output: str = "done", *, whole: bool = True) -> Event:
        """The episode is over; `output` is what a verifier judges."""
        body: EpisodeEnded = {
            "status": status,
            "stop_condition": "returned",
            "steps": self.step,
            "output": output,
            "reason": None,
            "whole": whole,
            "task_id": self.task_id,
            "task": self.task,
            "awaits": self.awaits,
        }
        return self.event("episode_ended", body)

    def reward(self, value: float | None = 1.0, *, judge: str | None = "judge", **fields: Any) -> Event:
        """Somebody judges it; `fields` are those of the record Reward."""
        return self.event("reward", reward_body(fields.pop("target", self.root), value, **fields), judge=judge)
