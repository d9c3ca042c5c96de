"""Whom seal serves, and by which rules: as `decisions` say, whosever settings it was started with."""

from __future__ import annotations

import json

import pytest

from millrace.infra.config import load
from millrace.infra.errors import TopicError
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.stages.decisions import id_of
from millrace.schemas import codec
from millrace.streams.seal.policy_terms import SETTING, announce, policies, terms_of
from millrace.testing.events import Episode
from tests.support.folding import of

TERMS = {"short_groups": "drop", "patience_ms": 10_000}


def decide(s, policy="q", value=None, text=None, **fields):
    decision = {"id": "d", "kind": "setting", "policy": policy, "name": SETTING, "reason": "", "author": "", "time": 0}
    value = json.dumps(value or TERMS) if text is None else text
    return s.bench.record("decisions", "q", "Decision", decision | {"value": value} | fields)


def test_a_policy_is_served_once_it_is_announced(seal):
    s = seal(policies=())
    assert s.reasons(s.run(Episode("r0", policy="q"))) == ["unknown_policy"]
    decide(s)
    out = s.run(Episode("r1", policy="q"))
    assert [row["policy"] for row in of(out, "Trajectory")] == ["q"]
    assert [(emit.topic, emit.record["kind"]) for emit in s.tick()] == [("q.completions", "progress")]
    assert policies(s.bench.state) == ["q"]


def test_each_policy_has_its_own_rules_and_the_newest_hold(seal, group):
    s = seal(policies=())
    decide(s)
    decide(s, "r", TERMS | {"short_groups": "top-up"})
    kinds = {}
    for ticket, policy in enumerate(("q", "r")):
        first, _ = group(2, ticket, policy=policy)
        s.run(first)
    for emit in s.tick(11):
        if emit.name == "Completion" and emit.record["kind"] != "progress":
            kinds[emit.topic] = emit.record["kind"]
    assert kinds == {"q.completions": "short", "r.completions": "top_up"}
    decide(s, "r", TERMS | {"short_groups": "train", "patience_ms": 5})
    assert len(of(s.tick(11), "Trajectory")) == 1, "the group that was topped up is closed by the newest rules"


def test_an_episode_trains_its_own_policy_alone_whoever_else_answered_in_it(seal):
    s = seal(policies=())
    decide(s)
    decide(s, "r")
    episode = Episode("r0", policy="q")
    start, mine = episode.start(), episode.call("mine")
    episode.policy = "r"
    theirs = episode.call("theirs", lineage="another")
    only = Episode("r1", policy="q")
    begun = only.start()
    only.policy = "r"
    nothing = only.call("nothing")
    for one in (episode, only):
        one.policy = "q"
    out = s.feed(episode, start, mine, theirs, episode.end(), episode.reward(1.0))
    out += s.feed(only, begun, nothing, only.end(), only.reward(1.0))
    mixed, other = of(out, "Trajectory")
    assert {emit.topic for emit in out if emit.name == "Trajectory"} == {"q.trajectories"}
    assert [lineage["calls"] for lineage in mixed["lineages"]] == [["mine"]]
    assert mixed["excluded"] == ["theirs:other_policy"]
    assert (other["lineages"], other["excluded"], other["tokens"]) == ([], ["nothing:other_policy"], 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "no JSON"},
        {"text": "[]"},
        {"value": {"short_groups": "drop"}},
        {"value": TERMS | {"short_groups": "burn"}},
        {"value": TERMS | {"patience_ms": 0}},
        {"value": TERMS | {"patience_ms": True}},
        {"policy": None},
        {"policy": "a/b"},
    ],
)
def test_what_makes_no_sense_is_one_dead_letter(seal, fields):
    s = seal(policies=())
    assert s.reasons(decide(s, **fields)) == ["bad_setting"]
    assert policies(s.bench.state) == []


def test_other_decisions_are_left_alone(seal):
    s = seal(policies=())
    assert decide(s, kind="governance") == decide(s, name="batch", text="3") == []
    assert s.bench.record("decisions", "q", "Decision", b"no record") == []
    assert policies(s.bench.state) == []


def test_a_policy_is_announced_once_for_each_change(tmp_path):
    flags = {"namespace": "n", "home": str(tmp_path), "policy.name": "q"}
    settings = load(flags=flags)
    bus = MemoryBus()
    with pytest.raises(TopicError):
        announce(settings, bus)
    bus.ensure_topics(settings.layout.specs())
    changed = load(flags=flags | {"policy.short_groups": "train"})
    assert [announce(with_, bus) for with_ in (settings, settings, changed, changed, settings)] == [
        *(True, False, True, False, True)
    ]
    rows = [codec.decode_as("Decision", record.value or b"") for record in bus.read("n.decisions", 0)]
    assert [json.loads(row["value"]) for row in rows] == [terms_of(settings), terms_of(changed), terms_of(settings)]
    assert [row["id"] for row in rows] == [id_of(row) for row in rows]
    assert {record.key for record in bus.read("n.decisions", 0)} == {b"q"}
