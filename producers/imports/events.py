"""Episodes as events of `raw`, in the form in which the gateway makes them, with ids and numbers of their own.

Invariants: the events of a group follow, byte by byte, from what its rows say, from the terms, and from how many equal
groups were made before it; never from other rows, so refine skips them wherever they come again; a model call holds no
token and says that it was imported, so nothing of it trains; rewards stand before the end, where seal still counts
them; each group is a source with numbers of its own, and the events of an episode are one chain; a group whose events
refine could not take is refused here, by the name of the bound."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from millrace.infra import proof
from millrace.infra.log.base import Outgoing
from millrace.infra.stages.letters import made_id
from millrace.producers.gateway.shape import unwieldy
from millrace.producers.imports.episode import Answer, Episode, Group, Judged, Reply, Seen, ToolUse
from millrace.producers.imports.messages import plain
from millrace.producers.imports.rows import BadRow, Content, json_text
from millrace.schemas import arrays, bounds, codec
from millrace.schemas.chain import START, VERSION, event_hash
from millrace.schemas.ids import Micros
from millrace.schemas.limits import beyond, beyond_body
from millrace.schemas.records import Body, EpisodeStarted, Event, EventKind, ModelCall, Reward, Split, Versions

IMPORTED = "imported"
"""why nothing of an imported call trains: nobody here saw its tokens sampled"""
JUDGE = "import"
"""who gives the rewards that a row claims"""
DRAFT = f"import-{made_id('import', 'draft')}"
"""the source under which a group is made to learn what it says"""
UNKNOWN: Micros = 0
"""when something happened of which no row says when"""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a command says of all its rows. split: that of rows which claim none; evaluation always stays."""

    topic: str
    policy: str
    tenant: str
    split: Split = "train"
    task: str = ""
    reward_key: str = ""


class Maker:
    """Makes the events of what one command imports, group after group. Remembers a digest of each."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._equal = Counter[bytes]()

    def group(self, group: Group) -> list[Outgoing]:
        """The records of a group. Raises BadRow."""
        said = content(self.draft(group))
        source = f"import-{made_id('import', said.hex(), self._equal[said])}"
        self._equal[said] += 1
        return self._records(group, source)

    def draft(self, group: Group) -> list[Outgoing]:
        """Its records under a name that all groups share: what they say, and how long they are. Raises BadRow."""
        return self._records(group, DRAFT)

    def _records(self, group: Group, source: str) -> list[Outgoing]:
        out: list[Outgoing] = []
        size = 0
        for sample, episode in enumerate(group.episodes):
            chain = _Chain(source, self._terms, sample, len(group.episodes), episode, len(out))
            for one in chain.records():
                size += len(one.value or b"")
                if size > bounds.ROW_BYTES:
                    raise BadRow(
                        "row_too_large",
                        f"its events have more than {bounds.ROW_BYTES:,} bytes (ROW_BYTES): each reply is kept with "
                        "all that was said before it",
                    )
                out.append(one)
        return out


def content(draft: Sequence[Outgoing]) -> bytes:
    """What a group says, as a digest of its draft. Pure."""
    digest = hashlib.sha256()
    for record in draft:
        digest.update(record.value or b"")
    return digest.digest()[:16]


class _Chain:
    """The events of one episode."""

    def __init__(self, source: str, terms: Terms, sample: int, size: int, episode: Episode, number: int) -> None:
        self._source, self._terms, self._episode = source, terms, episode
        self._sample, self._size, self._number = sample, size, number
        self.id = made_id("import", source, "trajectory", sample)
        self.group = self.id if size == 1 else made_id("import", source, "group")
        self._split: Split = "evaluation" if episode.split == "evaluation" else terms.split
        self._step, self._link = 0, START
        self._at = episode.at or UNKNOWN
        self._replies: list[str] = []
        self._lineages: list[tuple[str, Sequence[Content], int]] = []
        self._output = ""

    def records(self) -> Iterator[Outgoing]:
        """All of them, in order."""
        episode = self._episode
        task_id = self._terms.task or episode.task_id or self._task_id()
        self._at = episode.at or next((step.at for step in episode.steps if step.at), UNKNOWN)
        yield self._event("episode_started", self._start(task_id), "agent")
        for step in episode.steps:
            self._at = step.at or self._at
            match step:
                case Reply():
                    yield self._event("model_call", self._call(step), "policy", step.span)
                    response = self._replies[-1]
                    for call in step.message.get("tool_calls", ()):
                        asked = call["function"]
                        yield self._tool(call["id"], asked["name"], asked["arguments"], response)
                case ToolUse():
                    yield self._tool(step.call_id, step.name, step.arguments, None, step.span)
                case Answer():
                    yield self._answer(step)
                case Seen():
                    seen: Any = {"content": step.content, "media_type": "text/plain", "origin": step.origin}
                    yield self._event("observation", seen, "environment")
        for number, judged in enumerate(episode.rewards):
            yield self._event("reward", self._reward(number, judged), "evaluator")
        ended: Any = {
            "status": episode.status,
            "stop_condition": IMPORTED,
            "steps": self._step,
            "output": self._output,
            "reason": None,
            "whole": True,
            "task_id": task_id,
            "task": episode.task,
            "awaits": [],
        }
        yield self._event("episode_ended", ended, "agent")

    def _task_id(self) -> str:
        """Episodes that were asked the same have one task."""
        first = next(step for step in self._episode.steps if isinstance(step, Reply))
        return made_id("import", "task", json_text(list(first.messages[: first.upto])))

    def _start(self, task_id: str) -> EpisodeStarted:
        nothing: Versions = {
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
            "mode": "import",
            "versions": {**nothing, "agent": self._episode.agent},
            "replay": "non_replayable",
            "budget": {},
        }

    def _call(self, step: Reply) -> ModelCall:
        response = made_id("import", self.id, "reply", len(self._replies))
        asked = list(step.messages[: step.upto])
        lineage, opened = self._lineage(step, response)
        self._replies.append(response)
        self._output = plain(step.message)
        finish = step.finish or ("tool_calls" if step.message.get("tool_calls") else "stop")
        request: Content = {"model": step.model, "messages": asked} | (
            {"tools": list(step.tools)} if step.tools else {}
        )
        choice = {"index": 0, "message": step.message, "finish_reason": finish}
        answer = {"id": step.response_id or response, "model": step.model, "choices": [choice]}
        return {
            "call_id": made_id("import", response, "call"),
            "response_id": response,
            "choice": 0,
            "lineage": lineage,
            "opened": opened,
            "supersedes": None,
            "turn": len(self._replies) - 1,
            "prefix_len": 0,
            "prompt_ids": arrays.empty("int32"),
            "output_ids": arrays.empty("int32"),
            "output_logprobs": arrays.empty("float32"),
            "output_versions": arrays.empty("int32"),
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
            "engine": JUDGE,
            "engine_version": step.provider or "file",
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
            "untrainable_reason": IMPORTED,
        }

    def _lineage(self, step: Reply, response: str) -> tuple[str, str | None]:
        """(the conversation that a reply goes on with, why it begins one)."""
        for at, (name, messages, said) in enumerate(self._lineages):
            same = messages is step.messages or list(messages[:said]) == list(step.messages[:said])
            if said <= step.upto and same:
                self._lineages[at] = (name, step.messages, step.upto)
                return name, None
        name = made_id("import", response, "lineage")
        self._lineages.append((name, step.messages, step.upto))
        return name, IMPORTED

    def _tool(self, call_id: str, name: str, arguments: str, response: str | None, span: str | None = None) -> Outgoing:
        body: Any = {"call_id": call_id, "name": name, "arguments": arguments, "response_id": response}
        return self._event("tool_call", body, "agent", span)

    def _answer(self, step: Answer) -> Outgoing:
        body: Any = {
            "call_id": step.call_id,
            "name": step.name,
            "status": step.status,
            "content": step.content,
            "tool_version": None,
            "latency_us": step.latency_us,
            "side_effect": None,
        }
        return self._event("tool_result", body, "tool", step.span)

    def _reward(self, number: int, judged: Judged) -> Reward:
        self._at = judged.at or self._at
        return {
            "reward_id": made_id("import", self.id, "reward", number),
            "target_kind": "trajectory" if judged.reply is None else "turn",
            "target": self.id if judged.reply is None else self._replies[judged.reply],
            "span_start": None,
            "span_end": None,
            "source": f"{JUDGE}:{judged.source}" if judged.source else JUDGE,
            "source_version": "",
            "rubric_version": judged.rubric,
            "value": judged.value,
            "components": judged.components,
            "label": judged.label,
            "failure": None,
            "critique": judged.critique,
            "supersedes": None,
            "independent": False,
            "observed_at": self._at,
            "signal": None,
            "confidence": None,
            "replay": None,
        }

    def _event(self, kind: EventKind, body: Body, actor: str, span: str | None = None) -> Outgoing:
        terms = self._terms
        self._bounded(beyond_body(kind, cast(Any, body)))
        event: Event = {
            "id": made_id("import", self._source, "event", self._number),
            "kind": kind,
            "tenant": terms.tenant,
            "policy": terms.policy,
            "group": self.group,
            "root_trajectory": self.id,
            "trajectory": self.id,
            "parent_trajectory": None,
            "parent_event": None,
            "spawn_call": None,
            "attempt": self.id,
            "step": self._step,
            "actor": actor,
            "split": self._split,
            "event_time": self._at,
            "capture_time": self._at,
            "log_time": None,
            "source": self._source,
            "source_epoch": 0,
            "source_seq": self._number,
            "prev_hash": self._link,
            "hash": b"",
            "hash_version": VERSION,
            "source_place": None,
            "source_hash": None,
            "trace_id": self._episode.trace or self.id.replace("-", ""),
            "span_id": span,
            "governance": None,
            "body_encoding": "plain",
            "body": codec.encode_body(kind, cast(Any, body)),
        }
        self._bounded(beyond("Event", event))
        event["hash"] = event_hash(self._link, event)
        headers = {
            "id": event["id"],
            "kind": kind,
            "policy": terms.policy,
            "group": self.group,
            "trajectory": self.id,
            "source": self._source,
            "source-seq": str(self._number),
        }
        if kind == "reward" and terms.reward_key:
            headers[proof.HEADER] = proof.proof_of(terms.reward_key, event["hash"])
        self._step, self._link, self._number = self._step + 1, event["hash"], self._number + 1
        key = f"{terms.tenant}/{self.group}"
        encoded = {name: said.encode() for name, said in headers.items()}
        return Outgoing(terms.topic, key.encode(), codec.encode("Event", event), encoded)

    def _bounded(self, found: str | None) -> None:
        if found is not None:
            raise BadRow("out_of_bounds", found)


def _within(text: str, what: str) -> str:
    if unwieldy(text):
        raise BadRow(
            "too_many_values",
            f"{what} nests deeper than {bounds.DEPTH} levels (DEPTH) or has more than {bounds.VALUES:,} values "
            "(VALUES)",
        )
    return text
