"""From an ended episode to a reward event, whoever computes the verdict between.

Invariant: ids follow from what is judged, by whom and under which rubric, so a verdict that is published twice is one
reward; seal keeps the first. Judges finish out of order, so their events carry no source number and no chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.bus.base import Outgoing
from infra.chain import START, event_hash
from schemas import codec
from schemas.ids import Micros
from streams.reward.pool import Verdict
from streams.words import made_id


@dataclass(frozen=True, slots=True)
class Judge:
    """Who judges: the source that episodes await, and the version of its rubric."""

    source: str
    version: str
    rubric: str


def awaited(event: Mapping[str, Any], body: Mapping[str, Any], judge: Judge) -> bool:
    """Whether this event is the end of an episode that waits for this judge."""
    return event["kind"] == "episode_ended" and judge.source in body["awaits"]


def reward_event(
    event: Mapping[str, Any], verdict: Verdict, judge: Judge, now: Micros, topic: str, headers: Mapping[str, bytes]
) -> Outgoing:
    """The record for `raw` (full name `topic`) that says the verdict on the episode that `event` ended.

    `headers` are the event's, for the trace they carry."""
    target = event["trajectory"]
    identity = made_id("reward", target, judge.source, judge.rubric)
    body = {
        "reward_id": identity,
        "target_kind": "trajectory",
        "target": target,
        "span_start": None,
        "span_end": None,
        "source": judge.source,
        "source_version": judge.version,
        "rubric_version": judge.rubric,
        "value": verdict.value,
        "components": dict(verdict.components),
        "label": verdict.label,
        "failure": verdict.failure,
        "critique": verdict.critique,
        "supersedes": None,
        "independent": True,
        "observed_at": now,
    }
    copied = ("tenant", "policy", "group", "root_trajectory", "trajectory", "attempt", "split", "trace_id")
    record = {name: event[name] for name in copied} | {
        "id": made_id("event", identity),
        "kind": "reward",
        "parent_trajectory": None,
        "parent_event": event["id"],
        "spawn_call": None,
        "step": event["step"] + 1,
        "actor": "evaluator",
        "event_time": now,
        "capture_time": now,
        "log_time": None,
        "source": f"reward/{judge.source}",
        "source_epoch": 0,
        "source_seq": None,
        "prev_hash": START,
        "source_place": None,
        "source_hash": None,
        "span_id": None,
        "governance": None,
        "body_encoding": "plain",
        "body": codec.encode_body("reward", body),
    }
    record["hash"] = event_hash(START, record)
    ids = {"id": record["id"], "kind": "reward", "policy": event["policy"], "group": event["group"]}
    named = {name: value.encode() for name, value in {**ids, "trajectory": target}.items()}
    trace = {name: value for name, value in headers.items() if name == "traceparent"}
    return Outgoing(topic, f"{event['tenant']}/{event['group']}".encode(), codec.encode("Event", record), named | trace)
