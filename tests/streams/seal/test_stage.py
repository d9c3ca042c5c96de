"""Seal: which attempts count, when a sample is sealed, what is said about its group."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.stages.base import Later
from millrace.streams.seal.group_outcome import ClosingRules
from millrace.testing.events import Episode
from tests.streams.seal.conftest import Sealed
from tests.support.folding import of

SECOND = 1_000_000


def said(emits, *kinds):
    """Completions other than progress."""
    return [c for c in of(emits, "Completion") if c["kind"] != "progress" and (not kinds or c["kind"] in kinds)]


def test_a_group_is_complete_with_its_last_reward(seal, group):
    s, episodes = seal(), group(3)
    for episode in episodes[:-1]:
        assert of(s.run(episode), "Trajectory") == []
    out = s.run(episodes[-1], reward=0.5)
    (completion,) = said(out)
    samples = of(out, "Trajectory")
    assert [t["sample"] for t in samples] == [0, 1, 2]
    assert completion["kind"] == "complete"
    assert completion["trajectories"] == [Later(f"sample-{n}") for n in range(3)]
    assert (completion["ticket"], completion["size"], completion["samples"]) == (7, 3, [0, 1, 2])
    assert completion["rewards"] == [1.0, 1.0, 0.5]
    assert completion["tokens"] == [5, 5, 5]
    assert {e.topic for e in out} == {"p.trajectories", "p.completions"}
    assert {e.key for e in out} == {"7"}


def test_a_sealed_group_leaves_only_a_tombstone_for_a_while(seal, group):
    s = seal()
    for episode in group(2):
        s.run(episode)
    assert s.bench.state.keys() == ["z/p/local/7"]
    s.tick(ClosingRules().memory / SECOND + 1)
    assert s.bench.state.keys() == []


def test_the_first_ended_attempt_of_a_sample_wins(seal, group):
    s = seal()
    first, other = group(2)
    again = Episode("again", ticket=7, size=2, sample=0, attempt="a1", source="gateway-9")
    s.feed(again, again.start(), again.call("again-0"))
    s.run(first, reward=None)
    s.feed(again, again.end())
    assert s.reasons() == ["superseded"]
    s.feed(again, again.reward(0.0))
    assert s.reasons() == ["superseded", "superseded"]
    s.feed(first, first.reward(1.0))
    (completion,) = said(s.run(other))
    assert completion["rewards"] == [1.0, 1.0]
    assert [t["id"] for t in of(s.bench.emits, "Trajectory")] == ["t7-0", "t7-1"]


def test_an_attempt_that_still_runs_when_its_group_closes_is_superseded(seal, group):
    s, (episode,) = seal(), group(1)
    slow = Episode("slow", ticket=7, size=1, sample=0, attempt="a1", source="gateway-9")
    s.feed(slow, slow.start(), slow.call("slow-0"))
    s.run(episode)
    assert s.reasons() == ["superseded"]
    # Its later events change nothing and need no letter of their own; a late reward has one.
    assert s.feed(slow, slow.call("slow-1", keep=5), slow.end()) == []
    s.feed(slow, slow.reward(1.0))
    assert s.reasons() == ["superseded", "late_reward"]


def test_an_attempt_that_begins_after_its_group_closed_is_superseded(seal, group):
    s, (episode,) = seal(), group(1)
    s.run(episode)
    late = Episode("late", ticket=7, size=1, sample=0, attempt="a1", source="gateway-9")
    assert s.reasons(s.run(late)) == ["superseded", "late_reward"]
    assert len(of(s.bench.emits, "Trajectory")) == 1


def test_the_deadline_seals_with_what_is_there_and_a_missing_reward_is_no_zero(seal, group):
    s, episodes = seal(), group(2, wait_ms=5_000)
    s.run(episodes[0])
    s.run(episodes[1], reward=None)
    assert said(s.tick(4.9)) == []
    (completion,) = said(s.tick(0.2))
    assert completion["kind"] == "short"
    assert (completion["samples"], completion["missing"]) == ([0], [1])
    assert completion["reason"] == "1: no reward"
    silent = of(s.bench.emits, "Trajectory")[1]
    assert (silent["reward"], silent["missing"], silent["rewards"]) == (None, ["verifier"], [])
    # What comes later is kept and visible, and changes nothing.
    assert s.reasons(s.feed(episodes[1], episodes[1].reward(1.0))) == ["late_reward"]


def test_without_progress_no_deadline_passes(seal, group):
    s, (episode,) = seal(), group(1, wait_ms=5_000)
    s.run(episode, reward=None)
    assert said(s.bench.turn()) == []


def test_the_first_judgement_counts_and_a_correction_before_sealing_replaces_it(seal, group):
    s, episodes = seal(), group(2)
    s.run(episodes[0], reward=0.25)
    s.feed(episodes[0], episodes[0].reward(0.9, n=1))
    assert s.reasons() == ["duplicate_reward"]
    first = episodes[0].reward(0.25)
    body = {"supersedes": _reward_id(first), "n": 2}
    s.feed(episodes[0], episodes[0].reward(0.75, **body))
    assert s.reasons() == ["duplicate_reward", "superseded_reward"]
    (completion,) = said(s.run(episodes[1]))
    assert completion["rewards"] == [0.75, 1.0]


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["verifier", "agent"]), st.booleans()), max_size=8))
def test_what_a_replay_judges_changes_nothing_of_what_is_sealed(replayed):
    """Whenever it comes, whoever it speaks for, also where its text was redacted: no record differs, none is more."""

    def sealed(extra):
        s = Sealed()
        for number, episode in enumerate(_pair()):
            live = [episode.start(), episode.call(f"{number}"), episode.end(), episode.reward(0.5), episode.reward(1.0)]
            for at, event in enumerate(live, 5 * number):
                for place, source, flawed in extra:
                    if place == at:
                        again = episode.reward(1.0, source=source, replay="r", rubric_version="1")
                        s.feed(
                            episode, again, **({"eligibility": "audit_only", "reason": "redacted"} if flawed else {})
                        )
                s.feed(episode, event)
        for place, source, _ in extra:
            s.feed(episode, episode.reward(0.0, source=source, n=place, replay="late"))
        return [(emit.topic, emit.key, emit.name, _unplaced(emit.record, emit.name)) for emit in s.bench.emits]

    assert sealed(replayed) == sealed([])


def _pair():
    return [Episode(f"t7-{n}", ticket=7, size=2, sample=n) for n in range(2)]


def _unplaced(value, name=""):
    """Places in `events` move with every event that comes between, and the id of a dead letter with its place."""
    if isinstance(value, dict):
        moved = ("offset", "id") if name == "DeadLetter" else ("offset",)
        return {field: _unplaced(inner) for field, inner in value.items() if field not in moved}
    return [_unplaced(inner) for inner in value] if isinstance(value, list) else value


def _reward_id(event):
    from millrace.schemas import codec

    return codec.decode_body("reward", event["body"])["reward_id"]


def test_the_same_judgement_twice_counts_once(seal, group):
    s, episodes = seal(), group(2)
    s.run(episodes[0])
    s.feed(episodes[0], episodes[0].reward(1.0))
    assert s.reasons() == ["duplicate_reward"]


def test_a_failed_judgement_ends_the_wait_without_a_value(seal, group):
    s, (episode,) = seal(), group(1)
    s.run(episode, reward=None)
    out = s.feed(episode, episode.reward(None))
    assert said(out)[0]["kind"] == "short"
    (sample,) = of(out, "Trajectory")
    assert sample["reward"] is None
    assert sample["rewards"][0]["failure"] == "timeout"


def test_rewards_of_several_awaited_sources_and_targets_add_up(seal, group):
    s, (episode,) = seal(), group(1, awaits=("verifier", "style"))
    s.run(episode, reward=1.0)
    s.feed(episode, episode.reward(0.25, target_kind="step", target="t7-0-0", n=3))
    (completion,) = said(s.feed(episode, episode.reward(0.5, source="style", n=4)))
    assert completion["rewards"] == [1.75]


def test_what_nobody_awaits_is_kept_beside_the_reward(seal, group):
    s, (episode,) = seal(), group(1)
    s.feed(episode, episode.start(), episode.call("a"), episode.reward(1000.0, source="agent"), episode.end())
    out = s.feed(episode, episode.reward(0.5))
    (sample,) = of(out, "Trajectory")
    assert sample["reward"] == 0.5
    assert [(one["source"], one["value"]) for one in sample["rewards"]] == [("agent", 1000.0), ("verifier", 0.5)]


def test_where_nothing_is_awaited_every_source_counts(seal):
    s, episode = seal(), Episode("r1", awaits=())
    s.feed(episode, episode.start(), episode.call("a"), episode.reward(0.25, source="agent"))
    s.feed(episode, episode.reward(0.5, source="user"))
    (sample,) = of(s.feed(episode, episode.end()), "Trajectory")
    assert sample["reward"] == 0.75


def test_a_reward_of_the_group_counts_for_every_sample(seal, group):
    s, episodes = seal(), group(2, awaits=("ranker",))
    for episode in episodes:
        s.run(episode, reward=None)
    out = s.feed(episodes[0], episodes[0].reward(0.5, source="ranker", target_kind="group", target="7"))
    assert said(out)[0]["rewards"] == [0.5, 0.5]


@pytest.mark.parametrize("kind", ["trajectory", "step", "group"])
def test_a_reward_for_something_else_is_refused(seal, group, kind):
    s, (episode,) = seal(), group(1)
    s.run(episode, reward=None)
    assert s.reasons(s.feed(episode, episode.reward(1.0, target_kind=kind, target="nothing"))) == ["unknown_target"]


def test_events_of_nobody_are_orphans(seal):
    s, episode = seal(), Episode("r1")
    s.feed(episode, episode.call("a"), episode.end(), episode.reward(1.0))
    assert s.reasons() == ["orphan", "orphan", "orphan"]


def test_another_tenant_cannot_touch_an_attempt(seal):
    s, mine, theirs = seal(), Episode("r1"), Episode("r1", tenant="mallory")
    s.feed(mine, mine.start())
    assert s.reasons(s.feed(theirs, theirs.reward(1.0))) == ["orphan"]


def test_traffic_nobody_asked_for_is_a_group_of_its_own(seal):
    s, episode = seal(), Episode("r1")
    (completion,) = said(s.run(episode))
    assert (completion["kind"], completion["ticket"], completion["size"]) == ("unsolicited", None, 1)


def test_unfit_traffic_is_sealed_without_a_word_to_dispatch(seal):
    s, episode = seal(), Episode("r1", awaits=())
    out = s.run(episode, reward=None)
    assert said(out) == []
    assert of(out, "Trajectory")[0]["reward"] is None


def test_evaluations_go_elsewhere_and_never_complete(seal):
    s, episode = seal(), Episode("r1", split="evaluation")
    out = s.run(episode)
    assert [e.topic for e in out] == ["p.evaluations"]


@pytest.mark.parametrize(
    ("governance", "reason"),
    [
        ({"eligibility": "audit_only", "reason": "step_gap"}, "step_gap"),
        ({"eligibility": "audit_only", "reason": "unknown_tenant"}, "unknown_tenant"),
        ({"eligibility": "denied", "reason": "tenant:x"}, "tenant:x"),
    ],
)
def test_what_governance_flags_never_trains(seal, group, governance, reason):
    s, (episode,) = seal(), group(1)
    s.feed(episode, episode.start(), episode.call("a"))
    s.feed(episode, episode.end(), **governance)
    (completion,) = said(s.feed(episode, episode.reward(1.0)))
    (sample,) = of(s.bench.emits, "Trajectory")
    assert completion["kind"] == "short"
    assert (sample["lineages"], sample["tokens"], sample["v_head"]) == ([], 0, -1)
    assert sample["excluded"] == [f"a:{reason}"]


def test_a_gap_never_trains(seal, group):
    s, (episode,) = seal(), group(1)
    gap = episode.event
    s.feed(episode, episode.start(), episode.call("a"), gap("gap", {"missed": 1, "reason": "disk full"}))
    out = s.feed(episode, episode.end(whole=False), episode.reward(1.0))
    assert said(out)[0]["reason"] == "0: gap"


def test_a_gap_is_told_of_an_attempt_of_text_alone(seal, group):
    s, (episode,) = seal(), group(1)
    told = episode.call("a", prompt=(), output=(), trainable=False)
    s.feed(episode, episode.start(), told, episode.event("gap", {"missed": 1, "reason": "disk full"}))
    out = s.feed(episode, episode.end(whole=False), episode.reward(1.0))
    (sample,) = of(out, "Trajectory")
    assert [entry.partition(":")[0] for entry in sample["excluded"]] == ["a", "*"]
    assert sample["excluded"][-1] == "*:gap"


def test_a_withheld_call_is_left_out_and_the_rest_trains(seal, group):
    s, (episode,) = seal(), group(1)
    s.feed(episode, episode.start(), episode.call("a"))
    withheld = episode.call("b", keep=5, prompt=(), output=(), trainable=False)
    s.feed(episode, withheld, eligibility="audit_only", reason="redacted")
    s.feed(episode, episode.call("c", keep=12))
    out = s.feed(episode, episode.end(), episode.reward(1.0))
    (sample,) = of(out, "Trajectory")
    assert said(out)[0]["kind"] == "complete"
    assert sample["tokens"] == 2
    assert sample["excluded"] == ["b:text only", "c:missing_prefix"]


def test_group_that_never_ends_is_closed_when_its_patience_ends(seal, group):
    s, episodes = seal(ClosingRules(patience=60 * SECOND)), group(2)
    s.run(episodes[0])
    s.feed(episodes[1], episodes[1].start())
    (completion,) = said(s.tick(61))
    assert (completion["kind"], completion["reason"]) == ("short", "1: never ended")
    assert s.reasons() == ["superseded"]


def test_short_groups_may_train_as_they_are(seal, group):
    s, episodes = seal(ClosingRules(short_policy="train")), group(3)
    for episode in episodes[:2]:
        s.run(episode)
    (completion,) = said(s.run(episodes[2], status="failed"))
    assert (completion["kind"], completion["samples"], completion["missing"]) == ("complete", [0, 1], [2])
    assert len(completion["trajectories"]) == 2
    assert len(of(s.bench.emits, "Trajectory")) == 3


def test_one_sample_is_no_group_to_train(seal, group):
    s, episodes = seal(ClosingRules(short_policy="train")), group(2)
    s.run(episodes[0])
    assert said(s.run(episodes[1], status="failed"))[0]["kind"] == "short"


def test_a_top_up_asks_for_the_missing_samples_and_keeps_the_others(seal, group):
    s, episodes = seal(ClosingRules(short_policy="top-up", rounds=1)), group(2)
    s.run(episodes[0])
    out = s.run(episodes[1], status="failed")
    (asked,) = said(out)
    assert (asked["kind"], asked["missing"], asked["trajectories"]) == ("top_up", [1], [])
    assert s.reasons(out) == ["failed_sample"]
    again = Episode("again", ticket=7, size=2, sample=1, attempt="a1", source="gateway-9")
    (completion,) = said(s.run(again))
    assert (completion["kind"], completion["samples"]) == ("complete", [0, 1])
    assert {t["id"] for t in of(s.bench.emits, "Trajectory")} == {"t7-0", "again"}


def test_top_ups_end(seal, group):
    s, (episode,) = seal(ClosingRules(short_policy="top-up", rounds=1)), group(1)
    s.run(episode, status="failed")
    again = Episode("again", ticket=7, size=1, sample=0, attempt="a1", source="gateway-9")
    assert [c["kind"] for c in said(s.run(again, status="failed"))] == ["short"]


def test_versions_of_a_group_are_those_of_its_trainable_tokens(seal, group):
    s, episodes = seal(), group(2)
    for episode, version in zip(episodes, ([3, 4], [2, 5]), strict=True):
        s.feed(episode, episode.start(), episode.call(f"{episode.root}-a", version=version))
        out = s.feed(episode, episode.end(), episode.reward(1.0))
    (completion,) = said(out)
    assert (completion["v_head"], completion["v_tail"]) == (2, 5)


def test_progress_passes_the_slots_time_on_to_every_policy(seal):
    s = seal(policies=("p", "q"))
    out = s.tick()
    assert [(e.topic, e.record["kind"], e.record["time"]) for e in out] == [
        ("p.completions", "progress", s.now),
        ("q.completions", "progress", s.now),
    ]


def test_policies_without_topics_are_history_only(seal):
    s, episode = seal(), Episode("r1", policy="other")
    assert s.reasons(s.run(episode)) == ["unknown_policy"]


def test_sub_agents_are_part_of_their_root(seal, group):
    s, (episode,) = seal(), group(1)
    child = Episode("t7-0", trajectory="child", ticket=7, source="gateway-5")
    s.feed(episode, episode.start(), episode.call("a"))
    s.feed(child, child.start(), child.call("b", lineage="l1"), child.end())
    (sample,) = of(s.feed(episode, episode.end(), episode.reward(1.0)), "Trajectory")
    assert [lineage["calls"] for lineage in sample["lineages"]] == [["a"], ["b"]]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_reward_that_is_no_number_does_not_train(seal, group, value):
    s, (episode,) = seal(), group(1)
    assert said(s.run(episode, reward=value))[0]["kind"] == "short"


def test_records_that_do_not_decode_are_dead_letters(seal):
    s = seal()
    assert s.reasons(s.bench.record("events", "x", "", b"junk")) == ["undecodable"]
