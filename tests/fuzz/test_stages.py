"""No valid event, of any size or shape, ends a stage: odd records of every kind through refine, seal and dispatch.

`make fuzz N=...` draws that many examples; N is 40 by default, in a few seconds."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from millrace.infra.config import Governance
from millrace.infra.log.blobs import ClaimStore
from millrace.schemas import codec
from millrace.schemas.chain import event_hash
from millrace.streams.dispatch.stage import Dispatch
from millrace.streams.refine.detectors.base import Detector, Hit
from millrace.streams.refine.stage import Refine
from millrace.streams.seal.group_outcome import ClosingRules
from millrace.streams.seal.stage import Seal
from millrace.testing.events import Episode
from millrace.testing.world import CALM, World
from tests.support.odd import records
from tests.support.players import Plan, version_zero

COUNT = max(int(os.environ.get("MILLRACE_FUZZ", "0")) // 1000, 40)
"""histories: each costs about as much as a thousand requests"""
OTHERS = int(os.environ.get("MILLRACE_FUZZ_SEED") or 0)
SLOTS = 2
SECOND = 1_000_000
TOPICS = {"raw": SLOTS, "events": SLOTS, "dead-letters": SLOTS, "decisions": 1, "workers": 1} | {
    f"p.{name}": count
    for name, count in {
        "prompts": 1,
        "grants": SLOTS,
        "trajectories": 2,
        "evaluations": SLOTS,
        "completions": 1,
        "resolutions": 1,
        "weights": 1,
        "ledger": 1,
    }.items()
}
SIDES = {"prompts": "Prompt", "ledger": "LedgerEntry", "weights": "WeightVersion"}
GOOD_NUMBER = 2**40
"""of a prompt that comes after all odd ones"""


class Tokens(Detector):
    """Finds what looks like a token."""

    name = "tokens"

    def version(self) -> str:
        return "tokens-1"

    def scan(self, text: bytes) -> list[Hit]:
        at = text.find(b"ghp_")
        return [] if at < 0 else [Hit(at, at + 4, "github_pat", "tokens", True)]


def bodies(kind: str, *, huge: bool) -> st.SearchStrategy[dict[str, Any]]:
    return records(codec.BODIES[kind], huge=huge)


@st.composite
def histories(draw: st.DrawFn, huge: bool = False) -> list[tuple[str, Any]]:
    """(what, record) of things that happen: events of episodes with odd parts, wholly odd events, odd side records."""
    happened: list[tuple[str, Any]] = []
    episodes = [Episode(f"r{n}", policy="p", size=n + 1, group="g" if n else None) for n in range(3)]
    for _ in range(draw(st.integers(1, 10))):
        what = draw(st.sampled_from(["body", "body", "body", "plain", "envelope", "wild", "side", "decision", "bytes"]))
        episode = draw(st.sampled_from(episodes))
        match what:
            case "plain":
                make = draw(st.sampled_from([episode.start, episode.end, episode.reward, partial(episode.call, "a")]))
                happened.append(("event", make()))
            case "body" | "envelope":
                kind = draw(st.sampled_from(sorted(codec.BODIES)))
                ours = episode._start if kind == "episode_started" else {}
                odd = draw(bodies(kind, huge=huge))
                kept = draw(st.sets(st.sampled_from(sorted(odd)), max_size=len(odd)))
                body = {**odd, **{name: value for name, value in ours.items() if name not in kept}}
                event = episode.event(kind, body)
                if what == "envelope":
                    over = draw(records("Event", huge=huge))
                    names = draw(st.sets(st.sampled_from(sorted(over.keys() - {"body"})), max_size=4))
                    event = linked({**event, **{name: over[name] for name in names}})
                happened.append(("event", event))
            case "wild":
                happened.append(("event", linked(draw(records("Event", huge=huge)))))
            case "side":
                name = draw(st.sampled_from(sorted(SIDES)))
                happened.append((f"p.{name}", draw(records(SIDES[name], huge=huge))))
            case "decision":
                happened.append(("decisions", draw(records("Decision", huge=huge))))
            case _:
                happened.append(("bytes", draw(st.binary(max_size=30))))
    return happened


def linked(event: dict[str, Any]) -> dict[str, Any]:
    """The event with the hash of what it holds, so that it is not refused for that."""
    return {**event, "hash": event_hash(event["prev_hash"], event)}


def send(world: World, store: ClaimStore, what: str, record: Any) -> None:
    if what == "bytes":
        world.send("raw", "local/x", "", record)
    elif what == "event":
        value = store.fitting("Event", codec.encode("Event", record))
        world.send("raw", f"{record['tenant']}/{record['group']}", "", value)
    else:
        name = "Decision" if what == "decisions" else SIDES[what.removeprefix("p.")]
        world.send(what, "k", "", store.fitting(name, codec.encode(name, record)))


def play(happened: list[tuple[str, Any]], folder: str) -> None:
    store = ClaimStore(folder)
    stages = [
        lambda: Refine(Governance(), [Tokens()], slots=SLOTS, claims=store),
        lambda: Seal(["p"], ClosingRules(), store),
        lambda: Dispatch("p", SLOTS, claims=store),
    ]
    with World(0, TOPICS, stages, workers=1, chances=CALM, isolate=True, claims=store) as world:
        world.bus.max_bytes = 1 << 20
        event, entry = version_zero(Plan(world.random, 2, 1, 1, SLOTS, "reserve", 1.0, "drop"))
        world.send("p.weights", "p", "WeightVersion", event)
        world.send("p.ledger", "0", "LedgerEntry", entry)
        for what, record in happened:
            send(world, store, what, record)
            world.advance(SECOND)
        world.drain()
        good = Episode("good", tenant="bob", policy="p", group="good")
        for one in (good.start(), good.call("a"), good.end(), good.reward()):
            send(world, store, "event", one)
        prompt = {"id": "good", "policy": "p", "number": GOOD_NUMBER, "task": "{}", "group_size": 1, "awaits": []}
        send(world, store, "p.prompts", prompt)
        for _ in range(3):
            world.advance(400 * SECOND)
            world.drain()
        check(world)


def check(world: World) -> None:
    def decoded(topic: str) -> list[dict[str, Any]]:
        claims = world.settings.claims
        assert claims is not None
        return [codec.decode(claims.behind(record.value or b""))[1] for record in world.records(topic)]

    letters = decoded("dead-letters")
    ends = Counter(tuple(e["source_place"].values()) for e in decoded("events") if e.get("source_place"))
    ends.update(tuple(one["place"].values()) for one in letters if one["place"]["topic"] == "w.raw")
    assert ends == Counter(record.place for record in world.records("raw")), "each raw record has one end"
    assert any(one["id"] == "good" for one in decoded("p.trajectories")), "a good episode is sealed whatever came"
    odd = [one for one in letters if one["event_id"] is None and one["stage"] == "p.dispatch"]
    assert all(one["reason"] != "duplicate_prompt" or one["place"]["topic"] == "w.p.prompts" for one in odd)
    assert world.verify() > 0


@pytest.mark.slow
@seed(OTHERS)
@settings(derandomize=not OTHERS, max_examples=COUNT, suppress_health_check=list(HealthCheck))
@given(histories())
def test_no_valid_record_ends_a_stage(happened: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        play(happened, folder)


@pytest.mark.slow
@seed(OTHERS)
@settings(derandomize=not OTHERS, max_examples=max(COUNT // 4, 20), suppress_health_check=list(HealthCheck))
@given(histories(huge=True))
def test_no_valid_record_of_any_size_ends_a_stage(happened: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        play(happened, folder)
