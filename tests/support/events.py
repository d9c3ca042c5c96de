"""A scripted gateway: events with true chains, for tests of the stages and for the properties."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millrace.schemas import arrays, codec
from millrace.schemas.chain import START, VERSION, event_hash

VERSIONS = {"agent": "test", "harness": "test", "prompt": "1", "tools": {}}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 16, "seed": None, "stop": [], "n": 1}
USAGE = {"prompt": 3, "completion": 2, "cached": 0}
NOTHING: Mapping[str, Any] = {}


def made(*parts: object) -> str:
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
) -> dict[str, Any]:
    """A ModelCall body; `text` fills the request with a message of that text."""
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
        "request": codec_text(text) if text else request,
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
    }


def codec_text(text: str) -> bytes:
    """A chat request with one user message."""
    import orjson

    return orjson.dumps({"messages": [{"role": "user", "content": text}]})


def reward_body(target: str, value: float | None, **fields: Any) -> dict[str, Any]:
    """A Reward body for a trajectory unless told otherwise."""
    body = {
        "reward_id": made("reward", target, fields.get("source", "verifier"), fields.get("n", 0)),
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
    }
    return body | {name: value for name, value in fields.items() if name in body}


class Episode:
    """One attempt as a gateway would write it: events with dense steps and a true chain. `number` gives source seqs."""

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
        split: str = "train",
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
        self._start = {
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
        }

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.group}"

    def event(
        self, kind: str, content: Mapping[str, Any], *, judge: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The next event; a judge's event has no step, number or chain."""
        step = -1 if judge else self.step
        event = {
            "id": made(self.trajectory, judge or "", step, kind, content.get("reward_id", "")),
            "kind": kind,
            "tenant": self.tenant,
            "policy": self.policy,
            "group": self.group,
            "root_trajectory": self.root,
            "trajectory": self.trajectory,
            "parent_trajectory": None,
            "parent_event": None,
            "spawn_call": None,
            "attempt": self.attempt,
            "step": step,
            "actor": "evaluator" if judge else "gateway",
            "split": self.split,
            "event_time": self.clock(),
            "capture_time": self.clock(),
            "log_time": None,
            "source": judge or self.source,
            "source_epoch": 0,
            "source_seq": None if judge else self.numbers,
            "prev_hash": START if judge else self.hash,
            "hash": b"",
            "hash_version": VERSION,
            "source_place": None,
            "source_hash": None,
            "trace_id": None,
            "span_id": None,
            "governance": None,
            "body_encoding": "plain",
            "body": codec.encode_body(kind, content),
        } | fields
        event["hash"] = event_hash(event["prev_hash"], event)
        if not judge:
            self.step, self.hash, self.numbers = step + 1, event["hash"], self.numbers + 1
        return event

    def start(self) -> dict[str, Any]:
        return self.event("episode_started", self._start)

    def call(self, response: str, *, changed: Mapping[str, Any] = NOTHING, **fields: Any) -> dict[str, Any]:
        return self.event("model_call", {**model_call(response, **fields), **changed})

    def end(self, status: str = "completed", output: str = "done", *, whole: bool = True) -> dict[str, Any]:
        body = {
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

    def reward(self, value: float | None = 1.0, *, judge: str | None = "judge", **fields: Any) -> dict[str, Any]:
        return self.event("reward", reward_body(fields.pop("target", self.root), value, **fields), judge=judge)
