"""An ended episode to a reward event.

Invariants: the reward's ids follow from its target, source and rubric, so judging twice makes the same reward twice,
and seal counts the first; the event has no source number and belongs to no chain; it enters by `raw`, like everything
else, and with a key it carries the proof that refine asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from millrace.infra import proof, telemetry
from millrace.infra.log.base import Outgoing, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import full_name, logical_name
from millrace.schemas import codec, envelope
from millrace.schemas.envelope import Belonging, ChainLink, EventNumber
from millrace.schemas.errors import SchemaError
from millrace.schemas.ids import now_micros
from millrace.schemas.json_values import JsonObject
from millrace.schemas.records import EpisodeEnded, Event, Reward
from millrace.streams.decoding import Decoder, Unreadable, made_id
from millrace.streams.reward.conversation import Conversations
from millrace.streams.reward.pool import Verdict

TOO_LARGE = "too_large"
"""failure of a verdict that no record can hold"""
NO_TASK = Verdict(None, {}, None, None, "no_task")
"""on an episode that was given no task, as plain production calls are: there is nothing to judge it by"""
VERDICTS = telemetry.counter("millrace.reward.verdicts", "{verdict}", "verdicts, by source and outcome")


class Judging(Protocol):
    """What gives verdicts."""

    async def judge(self, task: str, output: str, episode: JsonObject) -> Verdict:
        """Never raises for what a verifier does."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Whose rewards these are."""

    source: str
    version: str
    rubric: str
    replay: str | None = None
    """the replay that judges history again: nothing awaits its rewards, and none of them counts for a sample"""
    independent: bool = True
    """whether it is apart from the policy that it judges"""


def reward_id(trajectory: str, evaluator: Evaluator) -> str:
    """The id of the reward that an evaluator gives a trajectory: judging twice makes the same one."""
    suffix = () if evaluator.replay is None else (evaluator.replay,)
    return made_id("reward", trajectory, evaluator.source, evaluator.rubric, *suffix)


def _of_none(end: Record, episode: Event) -> str | None:
    """Of an episode of which something could not be recorded."""
    return None


class Judge:
    """Judges the episodes of one policy that await its evaluator."""

    def __init__(
        self,
        pool: Judging,
        evaluator: Evaluator,
        policy: str,
        claims: ClaimStore | None = None,
        clock: Callable[[], int] = now_micros,
        key: str = "",
        conversations: Conversations | None = None,
    ) -> None:
        """conversations: where they are looked up, for a verifier that reads them."""
        self._pool = pool
        self._evaluator = evaluator
        self._policy = policy
        self._decode = Decoder(claims)
        self._claims = claims
        self._clock = clock
        self._key = key
        self._conversations = conversations

    async def __call__(self, record: Record) -> Outgoing | None:
        """The reward to write into raw for a record of `events`, None when it is not ours to judge."""
        subject = self._subject(record)
        if subject is None:
            return None
        event, end = subject
        episode: JsonObject = {
            "task_id": end["task_id"],
            "status": end["status"],
            "stop_condition": end["stop_condition"],
            "steps": end["steps"],
            "trajectory": event["trajectory"],
            "group": event["group"],
            "policy": event["policy"],
            "attempt": event["attempt"],
        }
        if self._conversations is not None:
            read = self._conversations.of if end["whole"] else _of_none
            episode["conversation"] = await asyncio.to_thread(read, record, event)
        with telemetry.span("millrace.reward", record.headers):
            verdict = await self._pool.judge(end["task"], end["output"] or "", episode) if end["task"] else NO_TASK
        return self._answer(record, event, verdict)

    def too_large(self, record: Record) -> Outgoing | None:
        """The failure that stands in for a verdict which the log refused for its size."""
        subject = self._subject(record)
        return None if subject is None else self._answer(record, subject[0], Verdict(None, {}, None, None, TOO_LARGE))

    def _subject(self, record: Record) -> tuple[Event, EpisodeEnded] | None:
        """The event and the end of an episode that awaits our verdict."""
        if record.headers.get("kind") != b"episode_ended":
            return None
        try:
            name, content = self._decode(record)
        except Unreadable:
            return None  # seal says so in a dead letter of its own
        if name != "Event":
            return None
        event = cast(Event, content)
        if event["policy"] != self._policy:
            return None
        if event["body_encoding"] != "plain" or event["trajectory"] != event["root_trajectory"]:
            return None
        try:
            end = codec.decode_body("episode_ended", event["body"])
        except SchemaError:
            return None  # seal says so, too
        evaluator = self._evaluator
        return (event, end) if evaluator.replay is not None or evaluator.source in end["awaits"] else None

    def _answer(self, record: Record, event: Event, verdict: Verdict) -> Outgoing:
        VERDICTS.add(1, source=self._evaluator.source, outcome=(verdict.failure or "judged").partition(":")[0])
        namespace = record.topic.removesuffix(f".{logical_name(record.topic)}")
        return self._outgoing(full_name(namespace, "raw"), record, event, self._reward(event, verdict))

    def _reward(self, event: Event, verdict: Verdict) -> Reward:
        evaluator = self._evaluator
        return {
            "reward_id": reward_id(event["trajectory"], evaluator),
            "target_kind": "trajectory",
            "target": event["trajectory"],
            "span_start": None,
            "span_end": None,
            "source": evaluator.source,
            "source_version": evaluator.version,
            "rubric_version": evaluator.rubric,
            "value": verdict.value,
            "components": verdict.components,
            "label": verdict.label,
            "failure": verdict.failure,
            "critique": verdict.critique,
            "supersedes": None,
            "independent": evaluator.independent,
            "observed_at": self._clock(),
            "signal": verdict.signal,
            "confidence": verdict.confidence,
            "replay": evaluator.replay,
        }

    def _outgoing(self, topic: str, record: Record, episode: Event, reward: Reward) -> Outgoing:
        belonging = Belonging(
            tenant=episode["tenant"],
            policy=episode["policy"],
            group=episode["group"],
            root=episode["root_trajectory"],
            trajectory=episode["trajectory"],
            attempt=episode["attempt"],
            split=episode["split"],
            trace_id=episode["trace_id"],
        )
        draft = envelope.draft(
            belonging,
            "reward",
            codec.encode_body("reward", reward),
            id=made_id("event", reward["reward_id"]),
            actor="evaluator",
            number=EventNumber(self._evaluator.source, 0, None),
            after=ChainLink(),
            event_time=reward["observed_at"],
            capture_time=reward["observed_at"],
            parent_event=episode["id"],
        )
        event = envelope.link(draft)
        headers = {name: text.encode() for name, text in envelope.headers_of(event).items()}
        if self._key:
            headers[proof.HEADER] = proof.proof_of(self._key, event["hash"]).encode()
        if "traceparent" in record.headers:
            headers["traceparent"] = record.headers["traceparent"]
        value = codec.encode("Event", event)
        # A critique may be of any length.
        return Outgoing(topic, record.key, self._claims.fitting("Event", value) if self._claims else value, headers)
