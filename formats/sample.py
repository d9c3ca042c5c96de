"""One trajectory as layouts are given it: its token traces, and its calls as chats. Pure.

Invariants: tokens, mask, log-probabilities and versions are the arrays of the sealed record, untouched; a call is here
only if its content may leave and nothing took it out of the sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from millrace.dialects.dialogue import Dialogue, Unsayable, dialogue, lesson
from millrace.dialects.rendering.base import Message
from millrace.formats.clearance import usable_calls
from millrace.infra.log.base import Place
from millrace.infra.log.history.requests import whole_calls
from millrace.infra.log.history.rows import Row
from millrace.schemas.arrays import unpack
from millrace.schemas.errors import SchemaError
from millrace.schemas.json_values import JsonObject
from millrace.schemas.records import Event, Lineage, ModelCall, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One lineage: tokens int32[T], mask uint8[T], logprobs float32[T], versions int32[T], as sealed."""

    id: str
    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]

    @property
    def first(self) -> int:
        """Where the first token lies that the policy sampled and that may train."""
        return int(np.argmax(self.mask != 0))

    @property
    def sampled_by(self) -> list[int]:
        """Versions of its trainable tokens, ascending."""
        return [int(version) for version in np.unique(self.versions[self.mask != 0])]


class ExportedSample:
    """One exported trajectory. `record` is the sealed one; `version` the one that trained on it; `traces` its lineages;
    `calls` its usable calls by lineage, in order; `group_reward` the mean reward of its group's exported samples."""

    def __init__(self, row: Row[Trajectory], calls: Sequence[Row[Event]], version: int | None, owner: str) -> None:
        """Raises Unsayable where content of it may not leave, or its arrays are none."""
        self.record: Trajectory = row.record
        self.place: Place = row.place
        self.version = version
        self.group_reward = math.nan
        usable = usable_calls(calls, owner)
        bodies = whole_calls(usable)
        self.tokenizers = frozenset(body["tokenizer_hash"] for body in bodies if body["tokenizer_hash"])
        self.traces = [_trace(lineage, self.record["id"]) for lineage in self.record["lineages"]]
        reasons = dict(entry.rpartition(":")[::2] for entry in self.record["excluded"])
        former = {body["supersedes"] for body in bodies if body["supersedes"]}
        self.calls: dict[str, list[ModelCall]] = {}
        for body in bodies:
            if body["response_id"] not in former and _is_used(body, reasons):
                self.calls.setdefault(body["lineage"], []).append(body)

    @property
    def id(self) -> str:
        return self.record["id"]

    @cached_property
    def dialogues(self) -> dict[str, list[Dialogue]]:
        """Every usable call as a chat, by lineage. Raises Unsayable where one is no whole lesson (see `lesson`), since
        later calls repeat what it said, or there is no call."""
        if not self.calls:
            raise Unsayable("no_call", "no call of it may be used")
        return {name: [lesson(self.record, call) for call in calls] for name, calls in self.calls.items()}

    def exact(self) -> list[Trace]:
        """Its traces. Raises Unsayable where it has none."""
        if not self.traces:
            raise Unsayable("no_exact_tokens", "it was sealed without a trainable token")
        return self.traces

    def only_trace(self) -> Trace:
        """Its one trace. Raises Unsayable where it has none or several."""
        traces = self.exact()
        if len(traces) > 1:
            raise Unsayable("several_lineages", f"it has {len(traces)} lineages, and a row here holds one")
        return traces[0]

    def only_lineage(self) -> tuple[str, list[Dialogue]]:
        """The name and the calls of its one lineage. Raises Unsayable where it has none or several."""
        if len(self.dialogues) > 1:
            raise Unsayable("several_lineages", f"it has {len(self.dialogues)} lineages, and a row here holds one")
        return next(iter(self.dialogues.items()))

    def conversations(self) -> dict[str, Dialogue]:
        """The last usable call of each lineage, which holds all that was said before. Raises Unsayable."""
        return {name: chats[-1] for name, chats in self.dialogues.items()}

    def messages(self) -> dict[str, list[Message]]:
        """What was said in each lineage, whole lesson or not, for rows whose mask says which tokens train; empty where
        a call is no chat of text."""
        try:
            return {name: [dialogue(call) for call in calls][-1].whole for name, calls in self.calls.items()}
        except Unsayable:
            return {}

    def finite_reward(self) -> float:
        """Its reward. Raises Unsayable where it has none."""
        reward = self.record["reward"]
        if reward is None or not math.isfinite(reward):
            raise Unsayable("no_reward", "it has no finite reward")
        return reward

    def facts(self) -> JsonObject:
        """What every layout may say about it beside its content."""
        record = self.record
        return {
            "policy": record["policy"],
            "tenant": record["tenant"],
            "group": record["group"],
            "sample": record["sample"],
            "trajectory": record["id"],
            "attempt": record["attempt"],
            "task_id": record["task_id"],
            "split": record["split"],
            "status": record["status"],
            "trained_version": self.version,
        }


def prompt_and_completion(calls: Sequence[Dialogue]) -> tuple[list[Message], list[Message]]:
    """(what was asked before the policy first spoke, what was said from there on). Raises Unsayable where a later call
    does not repeat it."""
    prompt, messages = calls[0].messages, calls[-1].whole
    if messages[: len(prompt)] != prompt:
        raise Unsayable("rewritten", "its agent rewrote what it had asked first")
    return prompt, messages[len(prompt) :]


def _is_used(call: ModelCall, reasons: dict[str, str]) -> bool:
    """Whether a call is part of its sample. One that only lacks exact tokens is, for layouts of text."""
    why = reasons.get(call["response_id"], reasons.get("*"))
    return why is None or (not call["trainable"] and why == (call["untrainable_reason"] or "untrainable"))


def _trace(lineage: Lineage, trajectory: str) -> Trace:
    try:
        parts = (lineage["tokens"], lineage["mask"], lineage["logprobs"], lineage["versions"])
        arrays = [unpack(part) for part in parts]
    except SchemaError as error:
        raise Unsayable("corrupt", str(error)) from error
    if len({len(part) for part in arrays}) != 1:
        raise Unsayable("corrupt", f"the arrays of lineage {lineage['id']} of {trajectory} differ in length")
    return Trace(lineage["id"], *arrays)
