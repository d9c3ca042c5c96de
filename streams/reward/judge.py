"""An ended episode to a reward event.

Invariants: the reward's ids follow from its target, source and rubric, so judging twice makes the same reward twice,
and seal counts the first; the event has no source number and belongs to no chain; it enters by `raw`, like everything
else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from infra import telemetry
from infra.bus.base import Outgoing, Record
from infra.chain import START, event_hash
from infra.claims import ClaimStore
from infra.topics import full_name, logical_name
from schemas import codec
from schemas.ids import now_micros
from streams.reward.pool import Verdict
from streams.words import Decoder, Unreadable, made_id

VERDICTS = telemetry.counter("millrace.reward.verdicts", "{verdict}", "verdicts, by source and outcome")


class Judging(Protocol):
    """What gives verdicts."""

    async def judge(self, task: str, output: str, episode: dict[str, Any]) -> Verdict:
        """Never raises for what a verifier does."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Whose rewards these are."""

    source: str
    version: str
    rubric: str


class Judge:
    """Judges the episodes of one policy that await its evaluator."""

    def __init__(
        self,
        pool: Judging,
        evaluator: Evaluator,
        policy: str,
        claims: ClaimStore | None = None,
        clock: Callable[[], int] = now_micros,
    ) -> None:
        self._pool = pool
        self._evaluator = evaluator
        self._policy = policy
        self._decode = Decoder(claims)
        self._claims = claims
        self._clock = clock

    async def __call__(self, record: Record) -> Outgoing | None:
        """The reward to write into raw for a record of `events`, None when it is not ours to judge."""
        if record.headers.get("kind") != b"episode_ended":
            return None
        try:
            _, event = self._decode(record)
        except Unreadable:
            return None  # seal says so in a dead letter of its own
        if event["policy"] != self._policy:
            return None
        if event["body_encoding"] != "plain" or event["trajectory"] != event["root_trajectory"]:
            return None
        ended = codec.decode_body("episode_ended", event["body"])
        if self._evaluator.source not in ended["awaits"]:
            return None
        episode = {name: ended[name] for name in ("task_id", "status", "stop_condition", "steps")}
        episode |= {name: event[name] for name in ("trajectory", "group", "policy", "attempt")}
        with telemetry.span("millrace.reward", record.headers):
            verdict = await self._pool.judge(ended["task"], ended["output"] or "", episode)
        VERDICTS.add(1, source=self._evaluator.source, outcome=(verdict.failure or "judged").partition(":")[0])
        namespace = record.topic.removesuffix(f".{logical_name(record.topic)}")
        return self._outgoing(full_name(namespace, "raw"), record, event, self._reward(event, verdict))

    def _reward(self, event: Mapping[str, Any], verdict: Verdict) -> dict[str, Any]:
        who = self._evaluator
        return {
            "reward_id": made_id("reward", event["trajectory"], who.source, who.rubric),
            "target_kind": "trajectory",
            "target": event["trajectory"],
            "span_start": None,
            "span_end": None,
            "source": who.source,
            "source_version": who.version,
            "rubric_version": who.rubric,
            "value": verdict.value,
            "components": verdict.components,
            "label": verdict.label,
            "failure": verdict.failure,
            "critique": verdict.critique,
            "supersedes": None,
            "independent": True,
            "observed_at": self._clock(),
        }

    def _outgoing(self, topic: str, record: Record, ended: Mapping[str, Any], reward: Mapping[str, Any]) -> Outgoing:
        kept = ("tenant", "policy", "group", "root_trajectory", "trajectory", "attempt", "split", "trace_id")
        event = {name: ended[name] for name in kept} | {
            "id": made_id("event", reward["reward_id"]),
            "kind": "reward",
            "parent_trajectory": None,
            "parent_event": ended["id"],
            "spawn_call": None,
            "step": -1,
            "actor": "evaluator",
            "event_time": reward["observed_at"],
            "capture_time": reward["observed_at"],
            "log_time": None,
            "source": self._evaluator.source,
            "source_epoch": 0,
            "source_seq": None,
            "prev_hash": START,
            "hash": b"",
            "source_place": None,
            "source_hash": None,
            "span_id": None,
            "governance": None,
            "body_encoding": "plain",
            "body": codec.encode_body("reward", reward),
        }
        event["hash"] = event_hash(START, event)
        headers = {
            name: str(event[name]).encode() for name in ("id", "kind", "policy", "group", "trajectory", "source")
        }
        if "traceparent" in record.headers:
            headers["traceparent"] = record.headers["traceparent"]
        value = codec.encode("Event", event)
        # A critique may be of any length.
        return Outgoing(topic, record.key, self._claims.fitting("Event", value) if self._claims else value, headers)
