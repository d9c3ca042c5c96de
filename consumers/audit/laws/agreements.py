"""The law that the records about one group agree: prompt, grant, completion and resolution say the same of it."""

from __future__ import annotations

import json
import math
import operator
from typing import NamedTuple

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.infra.log.history.rows import Mark, Row
from millrace.schemas.records import Completion, Decision, Grant, Prompt, Resolution


class _PromptTerms(NamedTuple):
    """What a prompt asks for; what it leaves open is the policy's own."""

    task: int
    size: int | None
    awaits: tuple[str, ...]

    def gives(self, grant: Row[Grant]) -> bool:
        """Whether a grant may come from it."""
        has_size = self.size in (None, grant["group_size"])
        return has_size and self.task == hash(grant["task"]) and self.awaits in ((), tuple(grant["awaits"]))


class _Terms(NamedTuple):
    """What a grant and its resolution both say, as a grant calls it."""

    prompt_id: str | None
    group_size: int
    min_version: int
    deadline: int | None


class _Resolution(NamedTuple):
    kind: str
    terms: _Terms
    time: int
    group: str
    common_values: str
    mark: Mark


class Agreements(Law):
    """Prompts come before grants, grants before resolutions, and each repeats the terms of the one before it. A ready
    group repeats a completion that said it was complete, sample by sample."""

    name = "agreements"
    sentence = "prompts, grants, completions and resolutions of a group name the same terms and samples"
    unit = "resolutions"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._prompts: dict[str, tuple[Mark, set[_PromptTerms]]] = {}
        """by id, which several may share"""
        self._number: tuple[int, Mark] | None = None
        self._asked: dict[str, tuple[str, str]] = {}
        self._resolved: dict[int, _Resolution] = {}
        self._ready: dict[str, _Resolution] = {}
        self._matched: set[str] = set()
        self._lost = 0

    def prompt(self, row: Row[Prompt]) -> None:
        if row["policy"] != self.facts.policy:
            self.fail(f"a prompt is for policy {row['policy']}", row, prompt=row["id"])
        if row.raw.key != row["id"].encode():
            self.fail("a prompt lies under another key than its id", row, prompt=row["id"])
        if self._number is not None and row["number"] > self._number[0] + 1:
            message = f"prompt {row['number']} follows prompt {self._number[0]}"
            self.fail(message, self._number[1], row, prompt=row["id"])
        if self._number is None or row["number"] > self._number[0]:
            self._number = (row["number"], row.mark)
        terms = _PromptTerms(hash(row["task"]), row["group_size"], tuple(row["awaits"]))
        self._prompts.setdefault(row["id"], (row.mark, set()))[1].add(terms)

    def decision(self, row: Row[Decision]) -> None:
        if row["kind"] == "setting" and row["policy"] in (None, self.facts.policy):
            if row["id"] in self._asked:
                self.fail(f"two decisions have the id {row['id']}", row)
            self._asked[row["id"]] = (row["name"], row["value"])

    def resolution(self, row: Row[Resolution]) -> None:
        self.finding.checked += 1
        if row["policy"] != self.facts.policy:
            self.fail(f"a resolution is of policy {row['policy']}", row, group=row["group"])
        if row["kind"] == "setting":
            self._setting(row)
            return
        if row["setting"] is not None:
            self.fail(f"a {row['kind']} group carries a setting", row, group=row["group"])
        if row["reason"] is None and row["kind"] not in ("ready", "failed"):
            self.fail(f"a {row['kind']} group has no reason", row, group=row["group"])
        terms = _Terms(row["prompt_id"], row["size"], row["min_version"], row["deadline"])
        outcome = _Resolution(row["kind"], terms, row["time"], row["group"], _common_values(row), row.mark)
        if row["ticket"] is not None and row["solicited"]:
            self._resolved.setdefault(row["ticket"], outcome)
        if row["kind"] == "ready":
            self._ready.setdefault(row["group"], outcome)

    def _setting(self, row: Row[Resolution]) -> None:
        setting = row["setting"]
        if setting is None or setting["decision"] is None:
            return
        decision = self._asked.get(setting["decision"])
        if decision is None:
            return  # the law about settings names it
        name, value = decision
        if setting["name"] != name or json.loads(setting["value"]) != json.loads(value):
            message = f"{setting['name']} became {setting['value']}, but decision {setting['decision']} asked for "
            self.fail(f"{message}{name} {value}", row, setting=setting["name"])

    def grant(self, row: Row[Grant]) -> None:
        ticket = row["ticket"]
        if row["policy"] != self.facts.policy:
            self.fail(f"a grant is of policy {row['policy']}", row, ticket=ticket)
        if self.facts.begins_at_zero("prompts"):
            self._of_prompt(row)
        samples, numbers = row["samples"], range(row["group_size"])  # a size may be any number: no list is as long
        every = len(samples) == row["group_size"] and all(map(operator.eq, samples, numbers))
        if not (every or row["round"]) or not all(sample in numbers for sample in samples):
            self.fail(f"ticket {ticket} grants other samples than its group has", row, ticket=ticket)
        resolution = self._resolved.get(ticket)
        if resolution is None:
            return
        terms = _Terms(row["prompt_id"], row["group_size"], row["min_version"], row["deadline"])
        for field, grant_value, resolution_value in zip(_Terms._fields, terms, resolution.terms, strict=True):
            if grant_value != resolution_value:
                message = f"ticket {ticket} was granted with {field} {grant_value} and resolved with {resolution_value}"
                self.fail(message, row, resolution.mark, ticket=ticket)
        if resolution.time < row["time"]:
            self.fail(f"ticket {ticket} was resolved before it was granted", row, resolution.mark, ticket=ticket)
        if resolution.kind == "expired" and resolution.time < row["lease_until"]:
            self.fail(f"ticket {ticket} expired before its lease ended", row, resolution.mark, ticket=ticket)

    def _of_prompt(self, row: Row[Grant]) -> None:
        ticket, prompt = row["ticket"], self._prompts.get(row["prompt_id"])
        if prompt is None:
            self.fail(f"ticket {ticket} is for prompt {row['prompt_id']}, which was never asked", row, ticket=ticket)
        elif not any(wish.gives(row) for wish in prompt[1]):
            message = f"ticket {ticket} is for another task, group size or other rewards than its prompt"
            self.fail(message, prompt[0], row, ticket=ticket)

    def completion(self, row: Row[Completion]) -> None:
        if row["policy"] != self.facts.policy:
            self.fail(f"a completion is of policy {row['policy']}", row, group=row["group"])
        if row["kind"] == "progress":
            return
        wrong = _flaw(row)
        if wrong:
            self.fail(f"a completion {wrong}", row, group=row["group"])
        resolution = self._ready.get(row["group"])
        if resolution is None or row["kind"] not in ("complete", "unsolicited"):
            return
        self._matched.add(row["group"])
        if _common_values(row) != resolution.common_values:
            message = "a group is ready with other samples, tokens or rewards than it was completed with"
            self.fail(message, row, resolution.mark, group=row["group"])

    def finish(self) -> None:
        has_beginning = self.facts.begins_at_zero("completions")
        for group, resolution in self._ready.items():
            if group not in self._matched and has_beginning:
                self.fail("a group is ready that was never said to be complete", resolution.mark, group=group)


def _common_values(row: Row[Completion] | Row[Resolution]) -> str:
    """What a resolution takes over from the completion that it answers, as one text: NaN equals NaN in it."""
    values = [row["group"], row["trajectories"], row["tokens"], row["rewards"], row["v_head"], row["v_tail"]]
    return repr([*values, row["size"]])


def _flaw(row: Row[Completion]) -> str:
    """What is wrong inside a completion; empty when nothing is."""
    counts = {len(row["samples"]), len(row["tokens"]), len(row["rewards"])}
    if row["kind"] != "top_up":
        counts.add(len(row["trajectories"]))
    if len(counts) != 1:
        return "does not list tokens and rewards of each sample"
    numbers = sorted([*row["samples"], *row["missing"]])
    if len(numbers) != row["size"] or numbers != list(range(len(numbers))):
        return f"of {row['size']} samples names {row['samples']} and misses {row['missing']}"
    if row["kind"] in ("complete", "unsolicited") and not row["samples"]:
        return "without samples is called complete"
    if row["kind"] == "complete" and row["v_head"] < 0:
        return "is called complete although nothing of it trains"
    if any(math.isinf(reward) for reward in row["rewards"]):
        return "holds a reward that is no number"
    return ""
