"""Dispatch: what is granted, when, and what becomes of it."""

from __future__ import annotations

import json
import math

import pytest

from millrace.streams.dispatch.stage import Dispatch, Terms
from tests.support.folding import Bench, of

NOW = 1_700_000_000_000_000
SECOND = 1_000_000


class Desk:
    """One dispatcher with the topics around it. `slots` is N."""

    def __init__(self, *, batch=2, eta=1, slots=1, start=True, group_size=2, **terms):
        self.bench = Bench(Dispatch("p", slots, Terms(**terms)))
        self.slots, self.now, self.prompts, self.versions = slots, NOW, 0, 0
        self.emits = self.bench.emits
        if start:
            self.version_zero(batch, eta, group_size)
            self.tick(0)

    def version_zero(self, batch=2, eta=1, group_size=2):
        fields = {"policy": "p", "version": 0, "parent": None, "mode": "full", "uri": "", "digest": "", "files": {}}
        fields |= {"tokenizer_hash": "", "template_hash": "", "seq_lo": 0, "seq_hi": 0, "time": 0}
        fields |= {"batch": batch, "eta": eta, "shards": 1, "group_size": group_size}
        return self.bench.record("p.weights", "p", "WeightVersion", fields)

    def tick(self, seconds=1.0, slots=None):
        self.now += int(seconds * SECOND)
        out = []
        for slot in range(self.slots) if slots is None else slots:
            out += self.say("progress", slot=slot)
        return out

    def prompt(self, count=1, **fields):
        out = []
        for _ in range(count):
            record = {"id": f"task-{self.prompts}", "policy": "p", "number": self.prompts, "task": "{}"}
            record |= {"group_size": None, "awaits": []} | fields
            self.prompts += 1
            out += self.bench.record("p.prompts", record["id"], "Prompt", record)
        return out

    def say(
        self, kind, ticket=None, *, slot=0, v=0, tail=None, missing=(), size=2, group=None, policy="p", rewards=None
    ):
        places = [{"topic": "w.p.trajectories", "partition": 0, "offset": n} for n in range(size)]
        record = {"kind": kind, "policy": policy, "slot": slot, "time": self.now, "ticket": ticket, "size": size}
        record |= {"group": "" if kind == "progress" else group or str(ticket), "samples": list(range(size))}
        record |= {
            "missing": list(missing),
            "trajectories": places,
            "tokens": [3] * size,
            "rewards": rewards or [1.0, math.nan],
        }
        record |= {"v_head": v, "v_tail": v if tail is None else tail, "reason": "because" if missing else None}
        return self.bench.record("p.completions", record["group"], "Completion", record)

    def commit(self, seq_hi):
        """A version is committed."""
        self.versions += 1
        entry = {"policy": "p", "version": self.versions, "seq_lo": 0, "seq_hi": seq_hi, "groups": [], "ranks": []}
        entry |= {"layout": "", "generation": 1, "leader": "", "unchanged": None, "masked_tokens": 0, "digest": ""}
        entry |= {"libraries": {}, "cpu": "", "config_hash": "", "code_hash": "", "metrics": {}, "eta": 1}
        entry |= {"prev_hash": b"", "hash": b"", "time": 0}
        return self.bench.record("p.ledger", str(self.versions), "LedgerEntry", entry)

    def decide(self, name, value, policy="p", kind="setting"):
        record = {"id": f"d-{name}", "kind": kind, "policy": policy, "name": name, "value": json.dumps(value)}
        record |= {"reason": "test", "author": "me", "time": 0}
        return self.bench.record("decisions", "p", "Decision", record)

    @property
    def grants(self):
        return of(self.emits, "Grant")

    @property
    def resolutions(self):
        return [r for r in of(self.emits, "Resolution") if r["kind"] != "setting"]

    @property
    def settings(self):
        return [r["setting"] for r in of(self.emits, "Resolution") if r["kind"] == "setting"]

    @property
    def reasons(self):
        return [r["reason"] for r in of(self.emits, "DeadLetter")]

    def order(self):
        return [(r["kind"], r["ticket"], r["seq"]) for r in self.resolutions]


def test_grants_are_dense_and_never_more_than_eta_plus_one_batches():
    d = Desk(batch=2, eta=1)
    d.prompt(10)
    assert [g["ticket"] for g in d.grants] == [0, 1, 2, 3]
    assert {(g["min_version"], g["deadline"], g["round"]) for g in d.grants} == {(0, 1, 0)}
    assert [g["samples"] for g in d.grants] == [[0, 1]] * 4
    for ticket in (0, 1):
        d.say("complete", ticket)
    assert len(d.grants) == 4, "ready groups still count until a version consumed them"
    d.commit(2)
    assert [g["ticket"] for g in d.grants] == [0, 1, 2, 3, 4, 5]
    assert (d.grants[-1]["min_version"], d.grants[-1]["deadline"]) == (1, 2)


def test_eta_zero_is_synchronous():
    d = Desk(batch=3, eta=0)
    d.prompt(9)
    for ticket in range(3):
        d.say("complete", ticket)
    assert len(d.grants) == 3
    d.commit(3)
    assert [g["min_version"] for g in d.grants] == [0, 0, 0, 1, 1, 1]


def test_nothing_is_granted_before_every_slot_has_spoken_and_version_zero_exists():
    d = Desk(slots=2, start=False)
    d.prompt(2)
    d.tick(0, slots=[0])
    d.version_zero()
    assert d.grants == []
    d.tick(0, slots=[1])
    assert len(d.grants) == 2


def test_grants_lie_on_the_partition_of_their_ticket():
    d = Desk(slots=2, batch=4)
    d.prompt(3)
    assert [e.partition for e in d.emits if e.name == "Grant"] == [0, 1, 0]


def test_a_prompt_may_ask_for_its_own_size_and_judges():
    d = Desk(awaits=("verifier",))
    d.prompt(group_size=5, awaits=["mine"])
    d.prompt()
    assert [(g["group_size"], g["awaits"]) for g in d.grants] == [(5, ["mine"]), (2, ["verifier"])]


def test_at_most_so_many_run_at_once():
    d = Desk(batch=4, max_running=2)
    d.prompt(8)
    assert len(d.grants) == 2
    d.say("complete", 1)
    assert len(d.grants) == 3


def test_reserve_keeps_room_for_stragglers():
    d = Desk(batch=2, eta=1)
    d.prompt(20)
    for ticket in (0, 1):
        d.say("complete", ticket)
    d.commit(2)  # version 1: tickets 4, 5 have deadline 2; 2, 3 still have deadline 1
    d.say("complete", 4, v=1)
    d.say("complete", 5, v=1)
    assert d.order() == [("ready", 0, 0), ("ready", 1, 1)], "seqs 2 and 3 are kept for tickets 2 and 3"
    d.say("complete", 3)
    assert d.order()[2:] == [("ready", 3, 2)]
    d.say("complete", 2)
    assert d.order()[3:] == [("ready", 2, 3), ("ready", 4, 4), ("ready", 5, 5)]


def test_a_straggler_that_expires_makes_way():
    d = Desk(batch=2, eta=1, lease=10 * SECOND, retries=0)
    d.prompt(6)
    for ticket in (0, 1, 3):
        d.say("complete", ticket)
    d.tick(5)
    d.commit(2)
    d.say("complete", 4, v=1)
    assert ("ready", 4, 3) not in d.order()
    d.tick(6)
    assert d.order()[-2:] == [("expired", 2, None), ("ready", 4, 3)]


def test_soft_releases_at_once():
    d = Desk(batch=2, eta=1, release="soft")
    d.prompt(20)
    for ticket in (0, 1):
        d.say("complete", ticket)
    d.commit(2)
    d.say("complete", 4, v=1)
    d.say("complete", 5, v=1)
    assert [seq for _, _, seq in d.order()] == [0, 1, 2, 3]


def _overtaken(release):
    """Ticket 2 of version 0 with eta 1 arrives when seq 4, batch 2, is next."""
    d = Desk(batch=2, eta=1, release=release)
    d.prompt(20)
    for ticket in (0, 1):
        d.say("complete", ticket)
    d.commit(2)
    for ticket in (4, 5):
        d.say("complete", ticket, v=1)
    return d


def test_reject_drops_what_is_too_old():
    d = _overtaken("reject")
    d.say("complete", 2, v=0, tail=1)
    assert d.order()[-1] == ("stale", 2, None)
    d.say("complete", 3, v=1)
    assert d.order()[-1] == ("ready", 3, 4)


def test_mask_head_drops_only_what_is_wholly_too_old():
    d = _overtaken("mask-head")
    d.say("complete", 2, v=0, tail=1)
    assert d.order()[-1] == ("ready", 2, 4)
    d.say("complete", 3, v=0, tail=0)
    assert d.order()[-1] == ("stale", 3, None)


def test_a_group_older_than_its_grant_is_rejected():
    d = Desk(batch=1, eta=0)
    d.prompt(3)
    d.say("complete", 0)
    d.commit(1)
    d.say("complete", 1, v=0)
    assert d.order()[-1] == ("rejected", 1, None)
    assert d.grants[-1]["ticket"] == 2, "a negative resolution makes room"


def test_a_short_group_failed():
    d = Desk()
    d.prompt(1)
    d.say("short", 0, missing=[1])
    (resolution,) = d.resolutions
    assert (resolution["kind"], resolution["reason"], resolution["prompt_id"]) == ("failed", "because", "task-0")


def test_a_lease_ends_in_log_time_and_its_prompt_is_granted_once_more():
    d = Desk(lease=10 * SECOND, retries=1)
    d.prompt(1)
    d.tick(9)
    assert d.resolutions == []
    d.tick(2)
    assert d.order() == [("expired", 0, None)]
    assert [(g["ticket"], g["prompt_id"]) for g in d.grants] == [(0, "task-0"), (1, "task-0")]
    d.tick(11)
    assert [g["ticket"] for g in d.grants] == [0, 1]


def test_time_is_that_of_the_slowest_slot():
    d = Desk(slots=2, lease=10 * SECOND)
    d.prompt(1)
    d.tick(100, slots=[0])
    assert d.resolutions == []
    d.tick(0, slots=[1])
    assert [r["kind"] for r in d.resolutions] == ["expired"]


def test_what_comes_for_a_resolved_ticket_is_a_dead_letter():
    d = Desk(lease=10 * SECOND)
    d.prompt(1)
    d.tick(11)
    for kind in ("complete", "short", "top_up"):
        d.say(kind, 0, missing=[0])
    d.say("complete", 99)
    assert d.reasons == ["ticket_resolved"] * 3 + ["unknown_ticket"]
    assert len(d.resolutions) == 1


def test_a_group_of_another_size_does_not_end_the_ticket():
    d = Desk()
    d.prompt(1)
    for kind in ("complete", "short", "top_up"):
        d.say(kind, 0, size=1)
    assert d.reasons == ["wrong_size"] * 3
    d.say("complete", 0)
    assert ("ready", 0, 0) in d.order()


def test_a_complete_group_that_waits_is_not_completed_twice():
    d = _held()
    d.say("complete", 4, v=1)
    assert d.reasons == ["duplicate_completion"]


def _held():
    d = Desk(batch=2, eta=1)
    d.prompt(20)
    for ticket in (0, 1):
        d.say("complete", ticket)
    d.commit(2)
    d.say("complete", 4, v=1)
    return d


def test_a_held_group_never_expires():
    d = _held()
    d.tick(10_000)
    assert ("expired", 4, None) not in d.order()
    assert ("ready", 4, 2) in d.order()


def test_a_top_up_repeats_its_grant_and_counts_as_none():
    d = Desk(lease=10 * SECOND)
    d.prompt(1)
    d.tick(9)
    d.say("top_up", 0, missing=[1])
    again = d.grants[-1]
    assert (again["ticket"], again["round"], again["samples"]) == (0, 1, [1])
    assert {k: again[k] for k in ("min_version", "deadline", "prompt_id", "group_size")} == {
        k: d.grants[0][k] for k in ("min_version", "deadline", "prompt_id", "group_size")
    }
    assert d.bench.state.get("book")["granted"] == 1
    d.tick(9)
    assert d.resolutions == []
    d.say("complete", 0)
    assert d.order() == [("ready", 0, 0)]


def test_unsolicited_groups_get_the_next_ticket_and_seq_at_once():
    d = Desk(batch=2, eta=1, unsolicited_share=0.5)
    d.prompt(1)
    d.say("unsolicited", group="u1", size=1)
    resolution = d.resolutions[-1]
    assert (resolution["kind"], resolution["ticket"], resolution["seq"]) == ("ready", 1, 0)
    assert (resolution["solicited"], resolution["deadline"]) == (False, 1)
    d.prompt(1)
    assert d.grants[-1]["ticket"] == 2


@pytest.mark.parametrize(
    ("eta", "share", "granted"), [(1, 0.5, 2), (1, 1.0, 2), (1, 0.25, 3), (3, 0.5, 4), (0, 1.0, 2)]
)
def test_grants_leave_room_for_the_share_of_unsolicited_groups(eta, share, granted):
    d = Desk(batch=2, eta=eta, unsolicited_share=share)
    d.prompt(20)
    assert len(d.grants) == granted, "all but the share, and never less than the next batch"
    room = 2 * (eta + 1) - granted
    for n in range(room):
        d.say("unsolicited", group=f"u{n}", size=1)
    assert d.order() == [("ready", granted + n, n) for n in range(room)]
    assert len(d.grants) == granted


def test_unsolicited_groups_are_declined_beyond_their_share():
    d = Desk(batch=2, eta=1, unsolicited_share=0.5)
    for n in range(3):
        d.say("unsolicited", group=f"u{n}", size=1)
    assert d.order() == [("ready", 0, 0), ("ready", 1, 1), ("declined", None, None)]
    assert d.resolutions[-1]["reason"] == "over the share of unsolicited groups"
    d.commit(2)
    d.say("unsolicited", group="u3", size=1, v=1)
    assert d.order()[-1] == ("ready", 2, 2), "a version consumed the others"


def test_unsolicited_groups_never_push_a_granted_one_past_its_deadline():
    d = Desk(batch=2, eta=1)
    d.prompt(4)
    d.decide("unsolicited_share", 1.0)
    for ticket in (0, 1):
        d.say("complete", ticket)
    d.commit(2)
    d.say("unsolicited", group="u", size=1, v=1)
    assert d.order()[-1][0] == "declined"
    assert d.resolutions[-1]["reason"] == "it would push a granted group past its deadline"


@pytest.mark.parametrize("release", ["reserve", "reject", "mask-head"])
def test_unsolicited_groups_that_are_too_old_are_declined(release):
    d = Desk(batch=1, eta=0, unsolicited_share=1.0, release=release)
    d.prompt(1)
    d.say("complete", 0)
    d.commit(1)
    d.say("unsolicited", group="u", size=1, v=0)
    assert d.resolutions[-1]["reason"] == "too old"


def test_settings_are_said_as_the_policy_begins():
    d = Desk(batch=2, eta=1)
    assert {s["name"]: (s["value"], s["from_seq"], s["from_ticket"]) for s in d.settings} == {
        "batch": ("2", 0, None),
        "eta": ("1", None, 0),
        "release": ('"reserve"', 0, 0),
        "unsolicited_share": ("0.0", 0, None),
        "lease_ms": ("300000", None, 0),
        "max_running": ("0", None, 0),
        "dynamic_sampling": ("false", 0, None),
    }


def test_a_new_batch_size_holds_behind_every_outstanding_deadline():
    d = Desk(batch=2, eta=1)
    d.prompt(30)
    d.decide("batch", 3)
    assert d.settings[-1] == {
        "name": "batch",
        "value": "3",
        "from_seq": 4,
        "from_ticket": None,
        "decision": "d-batch",
    }
    for ticket in range(4):
        d.say("complete", ticket)
    d.commit(2)
    assert d.grants[-1]["ticket"] == 6, "batch 2 is [4, 7)"


def test_eta_changes_for_new_grants_only():
    d = Desk(batch=2, eta=2)
    d.prompt(30)
    d.decide("eta", 0)
    assert (d.settings[-1]["from_ticket"], len(d.grants)) == (6, 6)
    for ticket in range(6):
        d.say("complete", ticket)
    d.commit(2)
    d.commit(4)
    assert len(d.grants) == 6
    d.commit(6)
    assert [(g["min_version"], g["deadline"]) for g in d.grants[6:]] == [(3, 3), (3, 3)]


def test_a_new_group_size_holds_for_new_grants_only():
    d = Desk(batch=2, eta=0, group_size=2)
    d.prompt(4)
    d.decide("group_size", 4)
    assert d.settings[-1] == {
        "name": "group_size",
        "value": "4",
        "from_seq": None,
        "from_ticket": 2,
        "decision": "d-group_size",
    }
    d.say("complete", 0)
    d.say("complete", 1)
    assert d.reasons == [], "a ticket keeps the size that it was granted with"
    d.commit(2)
    assert [(g["ticket"], g["group_size"], g["samples"]) for g in d.grants[2:]] == [
        (2, 4, [0, 1, 2, 3]),
        (3, 4, [0, 1, 2, 3]),
    ]


def test_another_release_policy_waits_until_nothing_is_outstanding():
    d = Desk(batch=2, eta=1)
    d.prompt(5)
    d.decide("release", "soft")
    assert all(s["name"] != "release" or s["value"] == '"reserve"' for s in d.settings)
    for ticket in range(4):
        d.say("complete", ticket)
    assert d.settings[-1] == {
        "name": "release",
        "value": '"soft"',
        "from_seq": 4,
        "from_ticket": 4,
        "decision": "d-release",
    }


def test_what_is_asked_before_version_zero_is_not_forgotten():
    d = Desk(start=False)
    d.prompt(3)
    d.decide("eta", 0)
    d.version_zero(batch=1, eta=1)
    d.tick(0)
    assert [(g["ticket"], g["deadline"]) for g in d.grants] == [(0, 0)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch", 0),
        ("batch", True),
        ("batch", "4"),
        ("eta", -1),
        ("group_size", 0),
        ("group_size", 2**20),
        ("release", "fast"),
        ("unsolicited_share", 1.5),
        ("lease_ms", 0),
        ("max_running", -1),
        ("dynamic_sampling", 1),
        ("colour", "red"),
    ],
)
def test_settings_that_make_no_sense_are_dead_letters(name, value):
    d = Desk()
    before = len(d.settings)
    d.decide(name, value)
    assert d.reasons == ["bad_setting"]
    assert len(d.settings) == before


def test_decisions_of_others_are_left_alone():
    d = Desk()
    d.decide("batch", 3, policy="other")
    d.decide("batch", 3, kind="governance")
    d.decide("sealing", {})
    assert d.reasons == []
    d.decide("max_running", 3, policy=None)
    assert d.settings[-1]["name"] == "max_running"


def test_junk_is_a_dead_letter():
    d = Desk()
    d.bench.record("p.completions", "x", "", b"junk")
    d.bench.record("p.prompts", "x", "Progress", {"stage": "x", "slot": 0, "time": 1})
    d.say("complete", 0, slot=5)
    d.say("complete", 0, policy="other")
    d.prompt(1)
    d.prompts = 0
    d.prompt(1)
    assert d.reasons == ["undecodable", "wrong_record", "wrong_record", "wrong_record", "duplicate_prompt"]


def test_no_completion_is_taken_before_version_zero():
    d = Desk(start=False)
    d.say("unsolicited", group="u", size=1)
    assert d.reasons == ["no_version"]


def test_under_dynamic_sampling_groups_that_teach_nothing_make_room_for_others():
    d = Desk(batch=1, eta=0, dynamic_sampling=True, unsolicited_share=1.0)
    d.prompt(3)
    d.say("complete", 0, rewards=[1.0, 1.0])
    assert (d.resolutions[-1]["kind"], d.resolutions[-1]["seq"]) == ("rejected", None)
    assert "all equal" in d.resolutions[-1]["reason"]
    assert d.grants[-1]["ticket"] == 1, "its room is granted again"
    d.say("complete", 1, rewards=[1.0, 0.5])
    assert (d.resolutions[-1]["kind"], d.resolutions[-1]["seq"]) == ("ready", 0)
    d.commit(1)
    d.say("unsolicited", group="u", v=1, rewards=[0.0, 0.0])
    assert (d.resolutions[-1]["kind"], "all equal" in d.resolutions[-1]["reason"]) == ("declined", True)


def test_a_group_of_one_or_without_rewards_is_not_even():
    d = Desk(batch=4, eta=0, dynamic_sampling=True)
    d.prompt(2)
    d.say("complete", 0, rewards=[math.nan, math.nan])
    d.say("complete", 1, rewards=[math.nan, 1.0])
    assert [r["kind"] for r in d.resolutions] == ["ready", "ready"]


def test_dynamic_sampling_can_be_asked_for_later():
    d = Desk(batch=4, eta=0)
    d.prompt(3)
    d.say("complete", 0, rewards=[1.0, 1.0])
    d.decide("dynamic_sampling", True)
    assert d.settings[-1]["from_seq"] == 1
    d.say("complete", 1, rewards=[1.0, 1.0])
    assert [r["kind"] for r in d.resolutions] == ["ready", "rejected"]
