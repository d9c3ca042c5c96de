"""An episode as bodies of events, in order, before they have an envelope.

Invariants: bodies follow from the episode, its id and its origin alone; a model call holds no token and says why
nothing of it trains; rewards stand before the end, where seal still counts them; a body that refine could not take is
refused here, by the name of the bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from millrace.dialects.shape import unwieldy
from millrace.formats.episodes.episode import (
    ClaimedReward,
    Episode,
    ReplyStep,
    ToolAnswerStep,
    ToolUseStep,
    UnansweredStep,
)
from millrace.formats.episodes.messages import text_content
from millrace.formats.episodes.rows import BadRow, Content, json_text
from millrace.infra.stages.letters import made_id
from millrace.schemas import arrays, bounds
from millrace.schemas.ids import Micros
from millrace.schemas.limits import beyond_body
from millrace.schemas.records import Body, EpisodeStarted, EventKind, ModelCall, Reward, Versions

UNKNOWN: Micros = 0
"""when something happened of which nobody says when"""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where episodes come from. label: in ids, and as engine, mode and judge; reason: why nothing of them trains;
    place: what stands for a provider that nobody names."""

    label: str
    reason: str
    place: str


IMPORT = Origin("import", "imported", "file")
"""files: nobody here saw their tokens sampled, and the episodes did not happen here"""


@dataclass(frozen=True, slots=True)
class BareEvent:
    """An event without its envelope."""

    kind: EventKind
    body: Body
    actor: str
    at: Micros
    span: str | None = None


class Bodies:
    """The bodies of one episode. size, sample: of its group; task: the one that its command names, else its own."""

    def __init__(
        self, origin: Origin, id: str, episode: Episode, *, size: int = 1, sample: int = 0, task: str = ""
    ) -> None:
        self.replies: list[str] = []
        """ids of the replies so far"""
        self._origin, self._id, self._episode = origin, id, episode
        self._size, self._sample, self._task = size, sample, task
        self._at = UNKNOWN
        self._step = 0
        self._lineages: list[tuple[str, Sequence[Content], int]] = []
        self._output = ""

    def drafts(self) -> Iterator[BareEvent]:
        """All of them, in order. Raises BadRow."""
        for draft in self._drafts():
            excess = beyond_body(draft.kind, cast(Any, draft.body))
            if excess is not None:
                raise BadRow("out_of_bounds", excess)
            self._step += 1
            yield draft

    def _drafts(self) -> Iterator[BareEvent]:
        episode = self._episode
        task_id = self._task or episode.task_id or self._task_id()
        self._at = episode.at or next((step.at for step in episode.steps if step.at), UNKNOWN)
        yield self._draft("episode_started", self._start(task_id), "agent")
        for step in episode.steps:
            self._at = step.at or self._at
            match step:
                case ReplyStep():
                    yield self._draft("model_call", self._call(step), "policy", step.span)
                    response = self.replies[-1]
                    for call in step.message.get("tool_calls", ()):
                        question = call["function"]
                        yield self._tool(call["id"], question["name"], question["arguments"], response)
                case ToolUseStep():
                    yield self._tool(step.call_id, step.name, step.arguments, None, step.span)
                case ToolAnswerStep():
                    yield self._answer(step)
                case UnansweredStep():
                    replies: Any = {"content": step.content, "media_type": "text/plain", "origin": step.origin}
                    yield self._draft("observation", replies, "environment")
        for number, rewards in enumerate(episode.rewards):
            self._at = rewards.at or self._at
            target = None if rewards.reply is None else self.replies[rewards.reply]
            id = made_id(self._origin.label, self._id, "reward", number)
            yield self._draft("reward", reward(self._origin, self._id, id, target, rewards, self._at), "evaluator")
        end: Any = {
            "status": episode.status,
            "stop_condition": self._origin.reason,
            "steps": self._step,
            "output": self._output,
            "reason": None,
            "whole": True,
            "task_id": task_id,
            "task": episode.task,
            "awaits": [],
        }
        yield self._draft("episode_ended", end, "agent")

    def _draft(self, kind: EventKind, body: Body, actor: str, span: str | None = None) -> BareEvent:
        return BareEvent(kind, body, actor, self._at, span)

    def _task_id(self) -> str:
        """Episodes that were asked the same have one task."""
        first = next(step for step in self._episode.steps if isinstance(step, ReplyStep))
        return made_id(self._origin.label, "task", json_text(list(first.messages[: first.upto])))

    def _start(self, task_id: str) -> EpisodeStarted:
        blank: Versions = {
            "agent": "",
            "harness": "",
            "prompt": "",
            "tools": {},
            "guardrail": "",
            "retrieval": "",
            "memory": "",
        }
        return {
            "task_id": task_id,
            "task": _within(self._episode.task, "what is known of the task"),
            "ticket": None,
            "group_size": self._size,
            "sample": self._sample,
            "min_version": 0,
            "deadline": None,
            "awaits": [],
            "reward_deadline_ms": 0,
            "mode": self._origin.label,
            "versions": {**blank, "agent": self._episode.agent},
            "replay": "non_replayable",
            "budget": {},
        }

    def _call(self, step: ReplyStep) -> ModelCall:
        response = made_id(self._origin.label, self._id, "reply", len(self.replies))
        messages = list(step.messages[: step.upto])
        lineage, opening = self._lineage(step, response)
        self.replies.append(response)
        self._output = text_content(step.message)
        finish = step.finish or ("tool_calls" if step.message.get("tool_calls") else "stop")
        request: Content = {"model": step.model, "messages": messages} | (
            {"tools": list(step.tools)} if step.tools else {}
        )
        choice = {"index": 0, "message": step.message, "finish_reason": finish}
        answer = {"id": step.response_id or response, "model": step.model, "choices": [choice]}
        return {
            "call_id": made_id(self._origin.label, response, "call"),
            "response_id": response,
            "choice": 0,
            "lineage": lineage,
            "opened": opening,
            "supersedes": None,
            "turn": len(self.replies) - 1,
            "prefix_len": 0,
            "prompt_ids": arrays.empty_array("int32"),
            "output_ids": arrays.empty_array("int32"),
            "output_logprobs": arrays.empty_array("float32"),
            "output_versions": arrays.empty_array("int32"),
            "request": _within(json_text(request), "what a reply answers").encode(),
            "response": _within(json_text(answer), "a reply").encode(),
            "sampling": {
                "temperature": step.temperature,
                "top_p": step.top_p,
                "top_k": 0,
                "max_tokens": step.max_tokens,
                "seed": None,
                "stop": [],
                "n": 1,
            },
            "finish_reason": finish,
            "stop_condition": None,
            "engine": self._origin.label,
            "engine_version": step.provider or self._origin.place,
            "engine_incarnation": "",
            "tokenizer_hash": "",
            "template_hash": "",
            "usage": {
                "prompt": step.prompt_tokens,
                "completion": step.completion_tokens,
                "cached": step.cached_tokens,
            },
            "cost": None,
            "latency_us": step.latency_us,
            "ttft_us": 0,
            "trainable": False,
            "untrainable_reason": self._origin.reason,
            "identified_by": None,
            "request_base": None,
            "request_kept": {},
            "earlier_engines": [],
        }

    def _lineage(self, step: ReplyStep, response: str) -> tuple[str, str | None]:
        """(the conversation that a reply goes on with, why it begins one)."""
        for at, (name, messages, size) in enumerate(self._lineages):
            is_same = messages is step.messages or list(messages[:size]) == list(step.messages[:size])
            if size <= step.upto and is_same:
                self._lineages[at] = (name, step.messages, step.upto)
                return name, None
        name = made_id(self._origin.label, response, "lineage")
        self._lineages.append((name, step.messages, step.upto))
        return name, self._origin.reason

    def _tool(
        self, call_id: str, name: str, arguments: str, response: str | None, span: str | None = None
    ) -> BareEvent:
        body: Any = {"call_id": call_id, "name": name, "arguments": arguments, "response_id": response}
        return self._draft("tool_call", body, "agent", span)

    def _answer(self, step: ToolAnswerStep) -> BareEvent:
        body: Any = {
            "call_id": step.call_id,
            "name": step.name,
            "status": step.status,
            "content": step.content,
            "tool_version": None,
            "latency_us": step.latency_us,
            "side_effect": None,
        }
        return self._draft("tool_result", body, "tool", step.span)


def reward(origin: Origin, trajectory: str, id: str, target: str | None, claim: ClaimedReward, at: Micros) -> Reward:
    """A judgement as a reward. target: the reply that it is about; None: the whole trajectory."""
    return {
        "reward_id": id,
        "target_kind": "trajectory" if target is None else "turn",
        "target": trajectory if target is None else target,
        "span_start": None,
        "span_end": None,
        "source": f"{origin.label}:{claim.source}" if claim.source else origin.label,
        "source_version": "",
        "rubric_version": claim.rubric,
        "value": claim.value,
        "components": claim.components,
        "label": claim.label,
        "failure": None,
        "critique": claim.critique,
        "supersedes": None,
        "independent": False,
        "observed_at": at,
        "signal": None,
        "confidence": None,
        "replay": None,
    }


def _within(text: str, name: str) -> str:
    if unwieldy(text):
        raise BadRow(
            "too_many_values",
            f"{name} nests deeper than {bounds.DEPTH} levels (DEPTH) or has more than {bounds.VALUES:,} values "
            "(VALUES)",
        )
    return text
