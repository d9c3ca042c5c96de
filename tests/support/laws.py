"""The properties P1 to P11 of a history, read from its topics alone (P1 also from dispatch's state, as it goes)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from millrace.infra.log.topics import changelog_of, full_name, stages_of, turns_of
from millrace.infra.stages.base import Op, View
from millrace.schemas import arrays, codec
from millrace.streams.dispatch.stage import Dispatch
from millrace.streams.dispatch.state import BOOK, Book
from millrace.testing.world import NAMESPACE, World
from tests.support.players import Plan, first_digest, next_digest


class Watched(Dispatch):
    """The production stage; after every record and timer (I1), (J) and the counters must hold (P1, P5, P10, P13)."""

    def on_record(self, view: View, record: Any, now: int) -> Iterable[Op]:
        before = self.granted(view)
        yield from super().on_record(view, record, now)
        self.check(view, before)

    def on_wake(self, view: View, key: str, now: int) -> Iterable[Op]:
        before = self.granted(view)
        yield from super().on_wake(view, key, now)
        self.check(view, before)

    def granted(self, view: View) -> int:
        return int((view.get(BOOK) or {}).get("granted", 0))

    def check(self, view: View, before: int) -> None:
        if view.get(BOOK) is None:
            return
        book, rules = self._book(view), self._rules(view)
        schedule = rules.schedule(book)
        assert book.outstanding == sum(count for _, count in book.waiting), "P5: outstanding is not what waits"
        assert 0 <= book.running <= book.outstanding, "P5: more run than are outstanding"
        if book.granted > before:  # a lower eta holds for new grants only
            assert book.granted - book.negative <= schedule.end(book.version + rules.eta), "P1: (I1) is broken"
        if rules.release == "reserve":
            for k in book.deadlines():
                assert book.seq + book.urgent(k) <= schedule.end(k), f"P1: (J) is broken at batch {k}"


class Facts:
    """A history at rest, read once."""

    def __init__(self, world: World, policy: str) -> None:
        self.world = world
        self.policy = policy
        self.resolutions = world.decoded(f"{policy}.resolutions")
        self.grants = world.decoded(f"{policy}.grants")
        self.ledger = world.decoded(f"{policy}.ledger")
        self.weights = world.decoded(f"{policy}.weights")
        self.trajectories = {
            (record.partition, record.offset): codec.decode_as("Trajectory", record.value or b"")
            for record in world.records(f"{policy}.trajectories")
        }
        self.tickets = [r for r in self.resolutions if r["kind"] != "setting"]
        self.ready = [r for r in self.tickets if r["kind"] == "ready"]
        self.letters = world.decoded("dead-letters")

    def samples(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The trajectories of a ready or trained group."""
        for place in group["trajectories"]:
            yield self.trajectories[place["partition"], place["offset"]]

    def versions(self, sample: dict[str, Any]) -> Iterator[int]:
        """The version of every trainable token."""
        for lineage in sample["lineages"]:
            mask, versions = arrays.unpack(lineage["mask"]), arrays.unpack(lineage["versions"])
            yield from versions[mask == 1].tolist()


def check(world: World, plan: Plan) -> Facts:
    """Every law. Raises AssertionError naming the first that is broken."""
    facts = Facts(world, plan.policy)
    order(facts)
    counts(facts)
    versions(facts)
    staleness(facts, plan)
    samples(facts)
    dispositions(facts)
    apart(facts, plan)
    return facts


def apart(facts: Facts, plan: Plan) -> None:
    """What a policy's topics hold, and what that was made of, is its own."""
    world, policy = facts.world, facts.policy
    for kind in ("prompts", "grants", "trajectories", "evaluations", "completions", "resolutions", "weights", "ledger"):
        strangers = {record["policy"] for record in world.decoded(f"{policy}.{kind}")} - {policy}
        assert not strangers, f"{policy}.{kind} holds records of {strangers}"
    own = {full_name(NAMESPACE, f"{policy}.trajectories")}
    for row in (*facts.resolutions, *(group for entry in facts.ledger for group in entry["groups"])):
        assert {place["topic"] for place in row["trajectories"]} <= own, f"{policy} learns from another's topic"
    events = {(r.partition, r.offset): codec.decode(r.value or b"")[1] for r in world.records("events")}
    for sample in facts.trajectories.values():
        assert sample["id"] in plan.roots, f"{policy} sealed an attempt of another"
        made_of = {events[place["partition"], place["offset"]]["policy"] for place in sample["events"]}
        assert made_of <= {policy}, f"a sample of {policy} holds calls of {made_of}"
    for topic in (changelog_of(stages_of(policy)["dispatch"]), turns_of(stages_of(policy)["dispatch"])):
        assert world.records(topic), f"{topic} is empty: another's dispatch keeps its state elsewhere"


def order(facts: Facts) -> None:
    """P4: seqs are dense, in the order of the topic; each ticket and each group is resolved once."""
    assert [r["seq"] for r in facts.ready] == list(range(len(facts.ready))), "P4: seqs are not dense"
    tickets = Counter(r["ticket"] for r in facts.tickets if r["ticket"] is not None)
    assert not tickets or max(tickets.values()) == 1, f"P4: resolved twice: {tickets.most_common(1)}"
    groups = Counter(r["group"] for r in facts.tickets if r["group"])
    assert not groups or max(groups.values()) == 1, f"P4: group resolved twice: {groups.most_common(1)}"


def counts(facts: Facts) -> None:
    """P5, P10: granted = ready + negative + outstanding, by what dispatch counts and what it wrote; dense tickets."""
    dispatch = facts.world.state(stages_of(facts.policy)["dispatch"], 0)
    state = dispatch.get(BOOK)
    book = Book.read(state or {"version": 0, "seq_hi": 0})
    first = [g["ticket"] for g in facts.grants if g["round"] == 0]
    unsolicited = [r["ticket"] for r in facts.ready if not r["solicited"]]
    assert sorted(first + unsolicited) == list(range(book.granted)), "P5: tickets are not dense"
    negative = [r for r in facts.tickets if r["kind"] != "ready" and r["ticket"] is not None]
    assert (book.seq, book.negative) == (len(facts.ready), len(negative)), "P5: counters and records differ"
    open_ = len(dispatch.keys("t/"))
    assert book.granted == len(facts.ready) + len(negative) + open_, "P5: granted != ready + negative + outstanding"


def versions(facts: Facts) -> None:
    """P6, P7, P8: versions are dense, ranges tile, and the weights are those of a learner that never failed."""
    assert [w["version"] for w in facts.weights] == list(range(len(facts.weights))), "P8: versions are not dense"
    assert [w["digest"] for w in facts.weights] == [e["digest"] for e in facts.ledger], "P6: weights and ledger differ"
    digest, at = first_digest(), 0
    for entry in facts.ledger:
        assert entry["seq_lo"] == at, "P6: ranges do not tile"
        batch = facts.ready[at : entry["seq_hi"]]
        at = entry["seq_hi"]
        if entry["version"]:
            digest = next_digest(digest, batch)
        assert entry["digest"] == digest, f"P6: version {entry['version']} differs from a history without crashes"
        assert [g["seq"] for g in entry["groups"]] == [r["seq"] for r in batch], "P6: a batch is not its seqs"


def staleness(facts: Facts, plan: Plan) -> None:
    """P2, P3: no trained token is older than eta under hard policies; with eta 0 each is of its batch's version."""
    etas = [r["setting"] for r in facts.resolutions if r["kind"] == "setting" and r["setting"]["name"] == "eta"]

    def eta(ticket: int) -> int:
        return int([s["value"] for s in etas if s["from_ticket"] <= ticket][-1])

    negatives = Counter(r["kind"] for r in facts.tickets)
    if plan.release in ("reserve", "soft"):
        assert not negatives["stale"], "P2: reserve and soft drop nothing as stale"
    for entry in facts.ledger:
        k = entry["version"] - 1
        for seq in range(entry["seq_lo"], entry["seq_hi"]):
            group = facts.ready[seq]
            if plan.dynamic_sampling:
                known = [reward for reward in group["rewards"] if not math.isnan(reward)]
                assert len(known) < 2 or len(set(known)) > 1, "P2: a group that teaches nothing was trained"
            bound = eta(group["ticket"])
            used = [v for sample in facts.samples(group) for v in facts.versions(sample)]
            assert used, "P2: a ready group without a trainable token"
            assert (min(used), max(used)) == (group["v_head"], group["v_tail"]), "P2: v_head or v_tail is wrong"
            if group["solicited"]:
                assert min(used) >= group["min_version"], "P2: a token older than its grant allows"
            if plan.release in ("reserve", "reject"):
                assert k - min(used) <= bound, f"P2: a token {k - min(used)} versions old, eta {bound}"
            if plan.release == "mask-head":
                assert k - max(used) <= bound, "P2: a group that is wholly stale was trained"
            if plan.release in ("reserve", "reject") and bound == 0:
                assert set(used) == {k}, "P3: with eta 0 a token of another version was trained"


def samples(facts: Facts) -> None:
    """P11: a sample is the first attempt of it that ended in partition order, sealed once, whatever came twice."""
    ended: dict[tuple[str, int], str] = {}
    started: dict[str, tuple[str, int]] = {}
    judged: dict[str, list[float | None]] = defaultdict(list)
    events: set[str] = set()
    for record in facts.world.records("events"):
        name, event = codec.decode(record.value or b"")
        if name != "Event" or event["policy"] != facts.policy:
            continue
        if event["source_seq"] is not None:
            assert event["id"] not in events, "P11: an event was counted twice"
            events.add(event["id"])
        body = codec.decode_body(event["kind"], event["body"])
        if event["kind"] == "episode_started":
            started[event["root_trajectory"]] = (event["group"], body["sample"])
        elif event["kind"] == "episode_ended":
            if event["root_trajectory"] in started:
                ended.setdefault(started[event["root_trajectory"]], event["root_trajectory"])
        elif event["kind"] == "reward":
            judged[event["root_trajectory"]].append(body["value"])
    topped_up = {g["ticket"] for g in facts.grants if g["round"]}
    seen: set[tuple[str, int]] = set()
    for sample in facts.trajectories.values():
        key = (sample["group"], sample["sample"])
        assert key not in seen, "P11: a sample was sealed twice"
        seen.add(key)
        if sample["ticket"] not in topped_up:
            assert ended[key] == sample["id"], "P11: a later attempt replaced the first that ended"
        if sample["rewards"]:
            assert sample["rewards"][0]["value"] == judged[sample["id"]][0], "P11: a later reward replaced the first"
    for group in facts.ready:
        numbers = [sample["sample"] for sample in facts.samples(group)]
        assert len(numbers) == len(set(numbers)) == len(group["trajectories"]), (
            "P11: a sample counts twice in its group"
        )
        assert {sample["group"] for sample in facts.samples(group)} == {group["group"]}, "P11: a foreign sample"


def dispositions(facts: Facts) -> None:
    """Every raw record ends as one event or one dead letter, or was skipped as a duplicate, as the turns say."""
    raw = len(facts.world.records("raw"))
    events = [e for e in facts.world.decoded("events") if "source_place" in e]
    places = Counter((e["source_place"]["partition"], e["source_place"]["offset"]) for e in events)
    dead = [x for x in facts.letters if x["stage"] == "refine"]
    places.update((x["place"]["partition"], x["place"]["offset"]) for x in dead)
    assert not places or max(places.values()) == 1, "a raw record has two ends"
    skipped = sum(turn["duplicates"] for turn in facts.world.decoded("turns.refine"))
    assert raw == len(places) + skipped, f"{raw} raw records, {len(places)} ends, {skipped} duplicates"
