"""The law that no episode is forgotten: what started ended or is still running, every model call is in one sample,
and a sample's reward is what its judges said.

Invariants: built from samples and dead letters, then compared with `events`, where each episode lies in one partition;
some hundred bytes a sample, 16 a model call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from millrace.consumers.audit.facts import Facts, PlaceIndex
from millrace.consumers.audit.law import Law, SealedSample
from millrace.infra.log.base import Place
from millrace.infra.log.history.rows import Mark, Row
from millrace.schemas.records import Completion, DeadLetter, Decision, Event, SealedReward, Trajectory

CLOSES = frozenset({"superseded", "failed_sample"})
"""dead letters of seal that end a whole attempt; they name its start"""
UNFOLDABLE = "unfoldable"
"""an event with such a letter changed nothing; at an attempt's start it may also say that its group cannot be closed"""
REFUSES = frozenset({"unknown_policy", "out_of_bounds", "too_many_attempts", "wrong_group", "bad_sample", UNFOLDABLE})
"""dead letters of seal at an attempt's start that say why it never began. Its end needs none of its own: where the
group was sealed meanwhile, nobody knows of either any more"""
REFUSAL = "refused"
EXCLUSIONS = frozenset({"orphan", "after_end", UNFOLDABLE})
"""dead letters of seal at a model call that is in no sample"""
ROUNDS = 4
"""a group is open for at most this many times its patience: once, and again for each top-up"""
PATIENCE = 300_000_000
"""micros, where no decision says how long a group waits for its samples"""
TRAINS = frozenset({"completed", "truncated"})


@dataclass(slots=True)
class _SampleFacts:
    """What a sample said, until its events are seen."""

    mark: Mark
    at: int
    rewards: dict[str, tuple[Any, ...]]
    group: str
    given_up: bool
    """sealed without an end, so perhaps between two calls of the same moment"""


@dataclass(slots=True)
class _Open:
    """An episode whose start was seen."""

    mark: Mark
    time: int
    wait: int
    has_ended: bool = False
    fate: str = ""


class Episodes(Law):
    """One start, at most one end, then one sample or one dead letter that says why there is none. What seal's time has
    not passed yet counts as running."""

    name = "episodes"
    sentence = "every episode has a sample, a dead letter or time left, and each call and reward its sample"
    unit = "episodes"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._sealed: dict[str, _SampleFacts] = {}
        self._named = PlaceIndex()
        self._letters: dict[tuple[int, int], list[str]] = {}
        self._open: dict[str, _Open] = {}
        self._writers: dict[str, tuple[str, Mark]] = {}
        self._patience = PATIENCE
        self._reached: dict[int, int] = {}
        self._shared: set[str] = set()
        """rewards of whole groups, given in the name of one of their episodes"""
        self._running = 0

    # -- what comes before the events

    def completion(self, row: Row[Completion]) -> None:
        self._reached[row["slot"]] = max(row["time"], self._reached.get(row["slot"], 0))

    def decision(self, row: Row[Decision]) -> None:
        patience = self.facts.patience(row)
        if patience is not None:
            self._patience = max(self._patience, patience)

    def trajectory(self, sample: SealedSample) -> None:
        row = sample.row
        self._sample(row)
        if row["tokens"] and row["status"] not in TRAINS:
            alone = row["ticket"] is None and row["status"] == "abandoned"
            if not alone:
                self.fail(f"a {row['status']} episode may train", row, **sample.ids)
        for call in sample.calls:
            if call is None:
                continue
            call_fields = _envelope_of(call)
            names = [name for name, value in _sealed_for(row).items() if call_fields[name] != value]
            if names:
                self.fail(f"a sample holds a model call of another {', '.join(names)}", row, call, **sample.ids)
        if row["policy"] != self.facts.policy:
            self.fail(f"a sample of policy {row['policy']} lies here", row, **sample.ids)

    def evaluation(self, row: Row[Trajectory]) -> None:
        self._sample(row)

    def _sample(self, row: Row[Trajectory]) -> None:
        id = row["id"]
        if id in self._sealed:
            self.fail("an episode has two samples", self._sealed[id].mark, row, trajectory=id)
        rewards = {r["reward_id"]: _verdict_of(r) for r in row["rewards"]}
        self._sealed[id] = _SampleFacts(row.mark, row["sealed_at"], rewards, row["group"], row["status"] == "abandoned")
        for place in row["events"]:
            self._named.add(Place(place["topic"], place["partition"], place["offset"]), 0)
        problem = _sum(row)
        if problem:
            self.fail(problem, row, trajectory=id, group=row["group"])

    def dead_letter(self, row: Row[DeadLetter]) -> None:
        place = row["place"]
        if row["stage"] == "seal" and place["topic"] == self.facts.topics["events"]:
            self._letters.setdefault((place["partition"], place["offset"]), []).append(row["reason"])

    # -- the events

    def event(self, row: Row[Event]) -> None:
        if row.name != "Event" or row["policy"] != self.facts.policy:
            return
        match row["kind"]:
            case "episode_started" if row["trajectory"] == row["root_trajectory"]:
                self._start(row)
            case "episode_ended" if row["trajectory"] == row["root_trajectory"]:
                self._end(row)
            case "model_call":
                self._call(row)
            case "reward":
                self._reward(row)

    def _reasons(self, row: Row[Event]) -> list[str]:
        return self._letters.get((row.place.partition, row.place.offset), [])

    def _start(self, row: Row[Event]) -> None:
        self.finding.checked += 1
        root, reasons = row["root_trajectory"], self._reasons(row)
        before = self._open.get(root)
        if row["body_encoding"] != "plain" or "duplicate_start" in reasons or (before and before.fate != REFUSAL):
            return
        episode = _Open(row.mark, row["log_time"] or 0, row.body["reward_deadline_ms"] * 1000)
        episode.fate = next((reason for reason in reasons if reason in CLOSES), "")
        if REFUSES.intersection(reasons):
            episode.fate = REFUSAL
        elif root in self._sealed:
            episode.fate = "sealed"
        self._open[root] = episode

    def _end(self, row: Row[Event]) -> None:
        episode = self._open.get(row["root_trajectory"])
        reasons = self._reasons(row)
        if episode is None:
            if not reasons and row["root_trajectory"] not in self._sealed and self._has_beginning(row):
                self.fail("an episode ended that never started", row, trajectory=row["root_trajectory"])
        elif "after_end" not in reasons and UNFOLDABLE not in reasons:
            episode.has_ended = True
            episode.fate = episode.fate or next((reason for reason in reasons if reason in CLOSES), "")

    def _call(self, row: Row[Event]) -> None:
        self.finding.facts["calls"] = self.finding.facts.get("calls", 0) + 1
        count, root = len(self._named.take(row.place)), row["root_trajectory"]
        if count > 1:
            self.fail(f"a model call is in {count} samples", row, trajectory=root, event=row["id"])
        if count and EXCLUSIONS.intersection(self._reasons(row)):
            self.fail("a model call is in a sample and has a dead letter", row, trajectory=root, event=row["id"])
        episode = self._open.get(root)
        if count or episode is None or episode.fate != "sealed" or episode.has_ended or row["body_encoding"] != "plain":
            return
        sample = self._sealed[root]
        # An end comes behind its calls, and sealing behind the end, however little time passes.
        in_time = (row["log_time"] or 0) < sample.at + (0 if sample.given_up else 1)
        if in_time and not self._reasons(row):
            self.fail("a model call of an episode is not in its sample", sample.mark, row, trajectory=root)

    def _reward(self, row: Row[Event]) -> None:
        if row["body_encoding"] != "plain" or UNFOLDABLE in self._reasons(row):
            return
        body = row.body
        if body["replay"] is not None:
            self._replay_reward(row)
            return
        writer = row["source"] if row["source_seq"] is None else "a gateway"
        first = self._writers.setdefault(body["source"], (writer, row.mark))
        if first[0] != writer:
            message = f"{body['source']} speaks through {writer} here and through {first[0]} before"
            self.fail(message, first[1], row, event=row["id"])
        if body["target_kind"] == "group":
            self._shared.add(body["reward_id"])
        sample = self._sealed.get(row["root_trajectory"])
        verdict = sample.rewards.get(body["reward_id"]) if sample else None
        if sample is None or verdict is None:
            return
        event_verdict = (body["source"], body["rubric_version"], body["value"], body["failure"])
        if verdict[:3] != event_verdict[:3] or (event_verdict[3] and verdict[3] != event_verdict[3]):
            self.fail("a sample holds a reward that its judge did not give", sample.mark, row, event=row["id"])
        del sample.rewards[body["reward_id"]]

    def _replay_reward(self, row: Row[Event]) -> None:
        """A reward that a replay made: beside the samples, never in one, and never a gateway's."""
        self.finding.facts["replayed"] = self.finding.facts.get("replayed", 0) + 1
        root, body = row["root_trajectory"], row.body
        if row["source_seq"] is not None:
            self.fail("a gateway's reward says that a replay made it", row, trajectory=root, event=row["id"])
        if self._reasons(row):
            self.fail("a reward that a replay made has a dead letter", row, trajectory=root, event=row["id"])
        sample = self._sealed.get(root)
        if sample is not None and body["reward_id"] in sample.rewards:
            self.fail("a sample holds a reward that a replay made", sample.mark, row, event=row["id"])

    def _has_beginning(self, row: Row) -> bool:
        return not self.facts.starts["events"].get(row.place.partition)

    def slot_end(self, partition: int) -> None:
        """Everything that belongs to these episodes lies in this partition."""
        time = self._reached.get(partition, 0)
        for root, episode in self._open.items():
            if episode.fate:
                self._settle(root, episode)
            elif time > episode.time + ROUNDS * self._patience + episode.wait:
                self.fail("an episode started and became nothing", episode.mark, trajectory=root)
            else:
                self._running += 1
        self._open.clear()
        self._shared.clear()

    def _settle(self, root: str, episode: _Open) -> None:
        sample = self._sealed.get(root)
        if sample is None or episode.fate == REFUSAL:
            return
        if not episode.has_ended:
            self.fail("a sample was sealed of an episode that did not end", sample.mark, episode.mark, trajectory=root)
        for id in sample.rewards:
            if id not in self._shared:
                self.fail(f"a sample holds reward {id}, which no judge gave", sample.mark, trajectory=root)

    def finish(self) -> None:
        self.finding.facts["running"] = self._running


def _envelope_of(call: Row[Event]) -> dict[str, str]:
    """Envelope fields of a call that its sample shares."""
    episode = {"root_trajectory": call["root_trajectory"], "attempt": call["attempt"], "split": call["split"]}
    return {"tenant": call["tenant"], "group": call["group"], **episode}


def _sealed_for(row: Row[Trajectory]) -> dict[str, str]:
    """The same as a sample says it."""
    episode = {"root_trajectory": row["id"], "attempt": row["attempt"], "split": row["split"]}
    return {"tenant": row["tenant"], "group": row["group"], **episode}


def _verdict_of(reward: SealedReward) -> tuple[Any, ...]:
    return reward["source"], reward["rubric_version"], reward["value"], reward["failure"]


def _sum(row: Row[Trajectory]) -> str:
    """What is wrong with a sample's reward; empty when it is the sum of what was judged."""
    values = [reward["value"] for reward in row["rewards"] if reward["value"] is not None]
    if row["reward"] is None:
        has_silence = row["missing"] or len(values) < len(row["rewards"]) or not values
        return "" if has_silence else "a sample has no reward although every judge spoke"
    if not values or not math.isclose(row["reward"], sum(values), rel_tol=1e-12):
        return f"a sample's reward is {row['reward']}, its judges' sum {sum(values)}"
    return ""
