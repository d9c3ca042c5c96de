"""P7 and P13: holes in the log change nothing, and an old view of versions and negatives never grants too much."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.infra.config import Governance
from millrace.infra.log.base import Outgoing
from millrace.infra.log.topics import full_name
from millrace.streams.dispatch.grants import may_grant
from millrace.streams.dispatch.release_policies import ReleaseCandidate, reserve
from millrace.streams.dispatch.state import Book, SettingsInForce
from millrace.streams.refine.stage import Refine
from millrace.streams.seal.stage import Seal
from millrace.testing.events import Episode
from millrace.testing.world import CALM, NAMESPACE, World
from tests.support.laws import Watched
from tests.support.players import POLICY, Plan, version_zero

TOPICS = {"raw": 1, "events": 1, "dead-letters": 1, "decisions": 1} | {
    f"{POLICY}.{name}": 1
    for name in ("prompts", "grants", "trajectories", "completions", "resolutions", "weights", "ledger", "evaluations")
}
OUTPUTS = ("events", "p.trajectories", "p.completions", "p.grants", "p.resolutions", "dead-letters")


def outputs(holes: bool) -> dict[str, list[dict[str, Any]]]:
    """What the stages write for one fixed traffic, with or without aborted transactions between any two records."""
    stages = [lambda: Refine(Governance(), [], slots=1), lambda: Seal([POLICY]), lambda: Watched(POLICY, 1)]
    plan = Plan(random.Random(1), 2, 1, 1, 1, "reserve", 0.0, "drop")
    with World(1, TOPICS, stages, workers=1, chances=CALM) as world:

        def put(*args: Any, **fields: Any) -> None:
            if holes:
                for topic in TOPICS:
                    hole(world, topic)
            world.send(*args, **fields)
            world.drain()

        event, entry = version_zero(plan)
        put(f"{POLICY}.weights", POLICY, "WeightVersion", event)
        put(f"{POLICY}.ledger", "0", "LedgerEntry", entry)
        for n in range(8):
            prompt = {"id": f"t{n}", "policy": POLICY, "number": n, "task": "{}", "group_size": 1, "awaits": []}
            put(f"{POLICY}.prompts", f"t{n}", "Prompt", prompt)
        world.advance(1_000_000)
        world.drain()
        for n in (2, 0, 3, 1):
            episode = Episode(f"r{n}", policy=POLICY, ticket=n, group=str(n))
            for made in (episode.start(), episode.call(f"c{n}"), episode.end()):
                put("raw", episode.key, "Event", made, source="g")
            put("raw", episode.key, "Event", episode.reward(1.0))
        world.advance(1_000_000)
        world.drain()
        return {topic: [unplaced(record) for record in world.decoded(topic)] for topic in OUTPUTS}


def hole(world: World, topic: str) -> None:
    """An aborted transaction of two records in the topic's one partition."""
    full = full_name(NAMESPACE, topic)
    transactor = world.bus.transactor(f"hole-{topic}")
    transactor.begin()
    for _ in range(2):
        transactor.send(Outgoing(full, b"", b"aborted", partition=0))
    transactor.close()


def unplaced(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the offsets inside it, and without the ids and links that follow from offsets."""
    gone = ("source_place", "place", "trajectories", "events", "id") if "place" in record else ()
    gone = gone or ("source_place", "trajectories", "events")
    gone += ("prev_hash", "hash") if "source_place" in record else ()
    return {name: value for name, value in record.items() if name not in gone}


def test_holes_in_every_topic_change_nothing():
    with_holes, without = outputs(True), outputs(False)
    assert len(without["p.resolutions"]) == 4 + 7, "four groups, and every setting as the policy began"
    assert with_holes == without


@settings(max_examples=300, deadline=None)
@given(
    batch=st.integers(1, 4),
    eta=st.integers(0, 3),
    choices=st.binary(min_size=50, max_size=400),
)
def test_views_that_lag_never_grant_too_much(batch, eta, choices):
    """P13: dispatch's view of the version trails the truth by any number; (I1), (J) and the bound hold all the same.
    A byte is an action and what it picks: lists of pairs would take longer to draw than to try."""
    rules = SettingsInForce([[0, batch]], eta, "reserve", None, 0.0, 1, 0, 1)
    book, truth, running, held = Book(0, 0), 0, [], []
    for choice in choices:
        pick, action = divmod(choice, 6)
        match "gcnrvw"[action]:
            case "g":
                if may_grant(book, rules, rules.schedule(book)):
                    running.append((book.version + eta, book.version))
                    book = book.granting(book.version + eta)
            case "c" if running:
                held.append(running.pop(pick % len(running)))
                held.sort()
                book = book.completing()
            case "n" if running:
                deadline, _ = running.pop(pick % len(running))
                book = book.completing().resolving(deadline, is_ready=False)
            case "r" if held:
                deadline, head = held[0]
                group = ReleaseCandidate(deadline, eta, head, head)
                if reserve(group, book, rules.schedule(book)) == "ready":
                    held.pop(0)
                    assert book.seq // batch - head <= eta, "a token older than eta"
                    book = book.resolving(deadline, is_ready=True)
            case "v":  # the learner commits every batch that is full
                truth = book.seq // batch
            case "w" if truth > book.version:  # dispatch hears of some of it
                version = book.version + 1 + pick % (truth - book.version)
                book = book.advance(version, version * batch)
        real = replace(book, version=truth, seq_hi=truth * batch)
        assert book.granted - book.negative <= rules.schedule(real).end(truth + eta), "(I1) against the truth"
        for k in book.deadlines():
            assert book.seq + book.urgent(k) <= (k + 1) * batch, "(J)"
