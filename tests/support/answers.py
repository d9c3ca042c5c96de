"""Answers to the questions of the warehouse, computed from the records of a history in Python: what SQL is held to.

They go by the records alone and share no code with the views. A row is a tuple in the order of the columns."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from millrace.infra.log.base import Record
from millrace.infra.log.topics import full_name
from millrace.schemas import arrays, codec
from millrace.streams.seal.rewards import combine, take
from millrace.testing.world import NAMESPACE
from tests.support.players import POLICY
from tests.support.whole import Whole

Rows = list[tuple[Any, ...]]
Fields = dict[str, Any]
Spot = tuple[int, int]


def task_of(id: str) -> str:
    """A task without its epoch."""
    return re.sub(r"@\d+$", "", id)


def mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None


@dataclass
class Answers:
    """Everything about one history, by question."""

    whole: Whole
    policy: str = POLICY
    branch: str = ""
    """a policy that learned from what this one sampled, where there is one"""

    # -- what the records hold

    @cached_property
    def events(self) -> list[tuple[Record, Fields, Fields]]:
        """(record, event, body), in the order in which they came into the history."""
        found = [
            (record, event, dict(codec.decode_body(event["kind"], event["body"])))
            for record, event in self.whole.rows("events")
        ]
        return sorted(found, key=lambda row: (row[1]["log_time"], row[0].partition, row[0].offset))

    def of_kind(self, kind: str) -> list[tuple[Record, Fields, Fields]]:
        """Events of one kind, of the policy."""
        return [row for row in self.of_any_policy(kind) if row[1]["policy"] == self.policy]

    def of_any_policy(self, kind: str) -> list[tuple[Record, Fields, Fields]]:
        return [row for row in self.events if row[1]["kind"] == kind]

    @cached_property
    def sealed(self) -> dict[Spot, Fields]:
        """Training samples by where they lie."""
        return {(record.partition, record.offset): sample for record, sample in self.whole.rows("trajectories")}

    @cached_property
    def every_sample(self) -> list[Fields]:
        """Sealed samples of training and of evaluation."""
        return [*self.sealed.values(), *(sample for _, sample in self.whole.rows("evaluations"))]

    @cached_property
    def trained(self) -> list[tuple[int, Fields, Spot, Fields]]:
        """(version, trained group, place, sample) of everything that trained."""
        return self._trained(entry for _, entry in self.whole.rows("ledger"))

    @cached_property
    def branched(self) -> list[tuple[int, Fields, Spot, Fields]]:
        """The same of the branch."""
        if not self.branch:
            return []
        records = self.whole.bus.read(full_name(NAMESPACE, f"{self.branch}.ledger"), 0)
        return self._trained(codec.decode_as("LedgerEntry", record.value or b"") for record in records)

    def _trained(self, entries: Iterable[Mapping[str, Any]]) -> list[tuple[int, Fields, Spot, Fields]]:
        return [
            (entry["version"], group, spot, self.sealed[spot])
            for entry in entries
            for group in entry["groups"]
            for spot in [(place["partition"], place["offset"]) for place in group["trajectories"]]
        ]

    def ages(self, version: int, sample: Fields) -> list[int]:
        """Of each trainable token of a sample, by how many versions it is older than what learned from it."""
        return [
            version - 1 - int(made)
            for lineage in sample["lineages"]
            for made, mask in zip(arrays.unpack(lineage["versions"]), arrays.unpack(lineage["mask"]), strict=True)
            if mask
        ]

    @cached_property
    def refused(self) -> dict[Spot, str]:
        """What seal said about events that did not count, by where these lie."""
        return {
            (letter["place"]["partition"], letter["place"]["offset"]): letter["reason"]
            for _, letter in self.whole.rows("dead-letters")
            if letter["stage"] == "seal"
        }

    # -- answers

    def trajectory(self, trajectory: str) -> Rows:
        """Trace of a sub-agent, step, kind and status of each event."""
        return [
            (
                "" if event["trajectory"] == trajectory else event["trajectory"],
                event["step"],
                event["kind"],
                _status(event["kind"], body),
            )
            for _, event, body in self.events
            if event["root_trajectory"] == trajectory
        ]

    def trained_by(self, version: int, branch: bool = False) -> Rows:
        """What a branch learned from was sampled by versions of another policy: how stale it is, nothing says."""
        found = []
        for made, group, spot, sample in self.branched if branch else self.trained:
            if made == version:
                ages = self.ages(version, sample)
                told = (None if branch else group["seq"], sample["group"], sample["sample"], sample["id"])
                told += (sample["tenant"], task_of(sample["task_id"]), sample["reward"], sample["tokens"], self.policy)
                stale = None if branch else sum(ages) / len(ages)
                found.append((*told, sample["v_head"], sample["v_tail"], stale, *spot))
        return sorted(found, key=lambda row: (row[0] or 0, row[2], *row[-2:]))

    def seen_by(
        self, trajectory: str = "", task: str = "", tenant: str = "", model: str = "", policy: str = ""
    ) -> Rows:
        """Policy, version, samples, groups, tokens."""
        asked = {
            event["root_trajectory"]
            for _, event, body in self.of_kind("model_call")
            if orjson.loads(body["request"]).get("model") == model
        }
        by_version: dict[tuple[str, int], list[Fields]] = defaultdict(list)
        learned = [(self.policy, *row) for row in self.trained] + [(self.branch, *row) for row in self.branched]
        for learner, version, _, _, sample in learned:
            if policy not in ("", learner):
                continue
            matches = [trajectory in ("", sample["id"]), task in ("", task_of(sample["task_id"]))]
            if all([*matches, tenant in ("", sample["tenant"]), not model or sample["id"] in asked]):
                by_version[learner, version].append(sample)
        return [
            (*version, len(found), len({s["group"] for s in found}), sum(s["tokens"] for s in found))
            for version, found in sorted(by_version.items())
        ]

    def staleness_by_version(self, since: int = 0) -> Rows:
        ages: dict[int, list[int]] = defaultdict(list)
        for version, _, _, sample in self.trained:
            ages[version] += self.ages(version, sample)
        return [
            (version, len(found), statistics.fmean(found), max(found), found.count(0) / len(found))
            for version, found in sorted(ages.items())
            if version >= since
        ]

    def reward_by_version(self) -> Rows:
        columns: dict[tuple[int, str], list[float]] = defaultdict(list)
        for sample in self.every_sample:
            if sample["v_tail"] >= 0 and sample["reward"] is not None:
                columns[sample["v_tail"], sample["split"]].append(sample["reward"])
        for version, _, _, sample in self.trained:
            columns[version, "trained"].append(sample["reward"])
        return [
            (version, *(cell for key in ("train", "trained", "evaluation") for cell in _told(columns[version, key])))
            for version in sorted({version for version, _ in columns})
        ]

    def reward_by_task(self, split: str = "train") -> Rows:
        """Task, samples, those without a reward, mean, spread."""
        by_task: dict[str, list[Fields]] = defaultdict(list)
        for sample in self.every_sample:
            if sample["split"] == split and sample["tokens"]:
                by_task[task_of(sample["task_id"])].append(sample)
        rows = []
        for task, samples in by_task.items():
            rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
            rows.append((task, len(samples), len(samples) - len(rewards), mean(rewards), statistics.pstdev(rewards)))
        return sorted(rows, key=lambda row: (row[3], row[0]))

    def reward_by_engine(self) -> Rows:
        calls = {(record.partition, record.offset): body for record, _, body in self.of_kind("model_call")}
        rewards: dict[tuple[str, str], list[float]] = defaultdict(list)
        counts: Counter[tuple[str, str]] = Counter()
        for sample in self.sealed.values():
            if sample["reward"] is not None:
                bodies = [calls[place["partition"], place["offset"]] for place in sample["events"]]
                engines = [(body["engine"], body["engine_incarnation"]) for body in bodies]
                counts.update(engines)
                for engine in set(engines):
                    rewards[engine].append(sample["reward"])
        return [(*engine, len(found), mean(found), counts[engine]) for engine, found in sorted(rewards.items())]

    def fates(self) -> dict[Spot, str]:
        """What became of each judgement, by where it lies."""
        counted = {
            (sample["id"], reward["reward_id"], reward["source"]): reward["value"]
            for sample in self.every_sample
            for reward in sample["rewards"]
        }
        dropped = {
            letter["trajectory"]: letter["reason"]
            for _, letter in self.whole.rows("dead-letters")
            if letter["stage"] == "seal" and letter["reason"] in ("superseded", "failed_sample")
        }
        found = {}
        for record, event, body in self.of_kind("reward"):
            spot, root = (record.partition, record.offset), event["root_trajectory"]
            key = (root, body["reward_id"], body["source"])
            if body["replay"] is not None:
                found[spot] = "replayed"
            elif spot in self.refused:
                found[spot] = self.refused[spot]
            elif key in counted:
                found[spot] = "failed" if counted[key] is None else "counted"
            else:
                found[spot] = dropped.get(root, "not_sealed")
        return found

    def funnel(self) -> Rows:
        """In no order."""
        found: Counter[tuple[str, str]] = Counter()
        found["attempt", "started"] = len(self.of_kind("episode_started"))
        found["attempt", "ended"] = len(self.of_kind("episode_ended"))
        for sample in self.every_sample:
            unfit = "nothing trainable" if not sample["tokens"] else "no reward" if sample["reward"] is None else "fit"
            found["sample", "evaluation" if sample["split"] == "evaluation" else unfit] += 1
        found["sample", "trained"] = len(self.trained)
        found.update(("group", r["kind"]) for _, r in self.whole.rows("resolutions") if r["kind"] != "setting")
        found.update(("reward", fate) for fate in self.fates().values())
        letters = [letter for _, letter in self.whole.rows("dead-letters")]
        letters = [letter for letter in letters if letter["policy"] in (None, self.policy)]
        found.update((f"dead letter of {letter['stage']}", letter["reason"]) for letter in letters)
        return [(*key, count) for key, count in found.items()]

    def waits_by_version(self) -> Rows:
        """Version, groups, then the mean of each wait and of the whole, in seconds."""
        times: dict[int, dict[str, int]] = defaultdict(dict)
        tickets = {}
        for _, event, body in self.of_kind("episode_started"):
            if body["ticket"] is not None:
                tickets[event["group"]] = body["ticket"]
                _least(times[body["ticket"]], "started", event["log_time"], min)
        for _, event, _ in self.of_kind("episode_ended"):
            if event["group"] in tickets:
                _least(times[tickets[event["group"]]], "ended", event["log_time"], max)
        for _, grant in self.whole.rows("grants"):
            _least(times[grant["ticket"]], "granted", grant["time"], min)
        for _, completion in self.whole.rows("completions"):
            if completion["kind"] in ("complete", "short"):
                _least(times[completion["ticket"]], "completed", completion["time"], max)
        for _, resolution in self.whole.rows("resolutions"):
            if resolution["ticket"] is not None:
                times[resolution["ticket"]]["resolved"] = resolution["time"]
        legs = ("granted", "started", "ended", "completed", "resolved", "trained")
        rows = []
        for _, entry in self.whole.rows("ledger"):
            groups = [times[group["ticket"]] for group in entry["groups"] if "granted" in times[group["ticket"]]]
            for group in groups:
                group["trained"] = entry["time"]
            if groups:
                waits = [
                    statistics.fmean((group[b] - group[a]) / 1e6 for group in groups)
                    for a, b in [*itertools.pairwise(legs), ("granted", "trained")]
                ]
                longest = max((group["trained"] - group["granted"]) / 1e6 for group in groups)
                rows.append((entry["version"], len(groups), *waits, longest))
        return rows

    def costs_by_tenant(self, tenant: str = "", policy: str = "") -> Rows:
        """Without the two percentiles of latency."""
        calls: dict[tuple[str, str, str, str], list[Fields]] = defaultdict(list)
        for _, event, body in self.of_any_policy("model_call"):
            if tenant in ("", event["tenant"]) and policy in ("", event["policy"]):
                calls[event["policy"], event["tenant"], orjson.loads(body["request"])["model"], body["engine"]].append(
                    body
                )
        rows = []
        for key, bodies in sorted(calls.items()):
            used = [sum(body["usage"][name] for body in bodies) for name in ("prompt", "cached", "completion")]
            prices = [body["cost"] for body in bodies if body["cost"] is not None]
            rows.append((*key, len(bodies), *used, math.fsum(prices) if prices else None))
        return rows

    def tool_failures(self, policy: str = "") -> Rows:
        """Policy, tool, calls, and how many ended ok, error, timeout, refused and unanswered. In no order."""
        answers = {
            (event["trajectory"], body["call_id"]): body["status"]
            for _, event, body in self.of_any_policy("tool_result")
        }
        ends: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for _, event, body in self.of_any_policy("tool_call"):
            if policy in ("", event["policy"]):
                ends[event["policy"], body["name"]][
                    answers.get((event["trajectory"], body["call_id"]), "unanswered")
                ] += 1
        return [
            (
                *tool,
                count.total(),
                count["ok"],
                count["error"],
                count["timeout"],
                count["denied"] + count["cancelled"],
                count["unanswered"],
            )
            for tool, count in ends.items()
        ]

    def late_rewards(self) -> Rows:
        """Trajectory, value, reward and what it would have been, by seal's own rules; in no order."""
        awaits = {event["root_trajectory"]: body["awaits"] for _, event, body in self.of_kind("episode_started")}
        samples = {sample["id"]: sample for sample in self.every_sample}
        judged: dict[str, list[tuple[str, Fields]]] = defaultdict(list)
        fates = self.fates()
        for record, event, body in self.of_kind("reward"):
            judged[event["root_trajectory"]].append((fates[record.partition, record.offset], body))
        rows = []
        for root, found in judged.items():
            place: Any = {"topic": "", "partition": 0, "offset": 0}
            counted: Any = {}
            for fate, body in found:
                if fate in ("counted", "failed", "superseded_reward"):
                    counted = take(counted, body, place, awaits[root]).judgements  # type: ignore[arg-type]
            for fate, body in found:
                if fate == "late_reward":
                    after = take(counted, body, place, awaits[root]).judgements  # type: ignore[arg-type]
                    rows.append((root, body["value"], samples[root]["reward"], combine(awaits[root], after)))
        return rows

    def compare(self, a: int, b: int) -> Rows:
        met: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: {a: [], b: []})
        for sample in self.every_sample:
            if sample["v_tail"] in (a, b) and sample["reward"] is not None:
                met[task_of(sample["task_id"]), sample["split"]][sample["v_tail"]].append(sample["reward"])
        return [
            (*key, len(by[a]), mean(by[a]), len(by[b]), mean(by[b]), statistics.fmean(by[b]) - statistics.fmean(by[a]))
            for key, by in sorted(met.items())
            if by[a] and by[b]
        ]

    def evaluated(self, version: int) -> Rows:
        """How, tasks, questions, answers, mean."""
        runs: Rows = [
            ("evaluate", run["tasks"], run["questions"], run["questions"] * run["samples"], run["mean"])
            for _, run in self.whole.rows("scores")
            if version in run["versions"]
        ]
        traffic: dict[str, list[float]] = defaultdict(list)
        for sample in self.every_sample:
            if sample["split"] == "evaluation" and sample["v_tail"] == version:
                traffic[task_of(sample["task_id"])].append(sample["reward"])
        return [*runs, *(("traffic", task, 1, len(found), mean(found)) for task, found in sorted(traffic.items()))]


def _status(kind: str, body: Mapping[str, Any]) -> str:
    name = {"episode_ended": "status", "model_call": "finish_reason", "tool_result": "status", "reward": "failure"}
    return body[name[kind]] or "" if kind in name else ""


def _told(values: Sequence[float]) -> tuple[int, float | None]:
    return len(values), mean(values)


def _least(times: dict[str, int], name: str, time: int, choose: Callable[[int, int], int]) -> None:
    times[name] = choose(times[name], time) if name in times else time
