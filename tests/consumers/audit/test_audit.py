"""A whole world passes, and each of many seeded corruptions is named by the law that must name it."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from functools import cache
from io import StringIO

import pytest
from rich.console import Console

from millrace.consumers.audit import LAWS, audit
from millrace.consumers.audit.command import WIDE, render
from millrace.consumers.audit.laws.events import RulesBySlot
from millrace.infra.errors import AuditError
from millrace.infra.log.base import Outgoing, Place, TopicSpec
from millrace.infra.log.history import extent
from millrace.infra.log.history.extent import MAY_BE_WHOLE
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from tests.consumers.audit.corruptions import CORRUPTIONS, Corruption
from tests.consumers.audit.corruptions.forgeries import ALREADY, MORE, UNSEEN
from tests.consumers.audit.corruptions.provenance import PROVENANCE
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.history_records import POLICY


@cache
def world(seed: int) -> History:
    return History(seed)


@pytest.mark.parametrize("seed", range(8))
def test_a_whole_world_is_clean(seed: int) -> None:
    report = audit(world(seed).bus, NS, POLICY)
    assert report.clean, report.violations[:3]
    assert all(finding.checked for finding in report.findings), "every law looked at something"


def test_rewards_that_a_replay_made_of_a_whole_world_break_nothing() -> None:
    h = History(0)
    before = len(h.rows("dead-letters"))
    h.replay("v2")
    report = audit(h.bus, NS, POLICY)
    assert report.clean, report.violations[:3]
    assert report.finding("episodes").facts["replayed"] == len(h.played)
    assert len(h.rows("dead-letters")) == before


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize(("corruption", "law"), CORRUPTIONS, ids=lambda value: getattr(value, "__name__", value))
def test_each_corruption_is_named_by_its_law(corruption: Corruption, law: str, seed: int) -> None:
    broken = world(seed).copy()
    place = corruption(broken, random.Random(seed))
    finding = audit(broken.bus, NS, POLICY).finding(law)
    assert not finding.holds
    assert any(place in violation.records for violation in finding.violations), finding.violations


def test_every_claim_has_its_corruption() -> None:
    broken = {law for _, law in [*CORRUPTIONS, *ALREADY, *UNSEEN, *MORE, *PROVENANCE]}
    assert {law.name for law in LAWS} <= broken


def test_an_aborted_transaction_or_bad_raw_bytes_break_nothing() -> None:
    """Holes in offsets are everywhere in the world above; so is one raw record that decodes as nothing."""
    h = world(0)
    assert len(h.rows("dead-letters")) == 1
    assert any(entry is None for log in h.bus.logs[h.topic("completions")] for entry in log.entries)


def test_raw_may_lose_its_head() -> None:
    h = world(1).copy()
    for partition in range(2):
        h.bus.delete_before(h.topic("raw"), partition, 40)
    report = audit(h.bus, NS, POLICY)
    assert report.clean, report.violations[:3]
    assert any("raw has lost its beginning" in note for note in report.notes)
    assert any("retention" in note for note in report.finding("capture-chain").notes)


def test_every_topic_with_retention_may_lose_its_head() -> None:
    h = world(2).copy()
    for kind in ("raw", "events", "trajectories", "completions", "grants", "turns.refine", "turns.seal"):
        for partition, log in enumerate(h.bus.logs[h.topic(kind)]):
            h.bus.delete_before(h.topic(kind), partition, len(log.entries) // 3)
    report = audit(h.bus, NS, POLICY)
    assert report.clean, report.violations[:3]


def test_what_is_in_flight_is_no_violation() -> None:
    h = world(3).copy()
    raw = h.rows("raw")[0][0]
    h.bus.publisher().publish(Outgoing(raw.topic, raw.key, raw.value, {}, raw.partition))
    report = audit(h.bus, NS, POLICY)
    assert report.clean
    assert report.finding("dispositions").facts["in flight"] == 1


def test_refine_that_does_not_keep_up_is_named() -> None:
    h = world(3).copy()
    raw = h.rows("raw")[0][0]
    log = h.bus.logs[raw.topic][raw.partition]
    log.entries.append(replace(raw, offset=len(log.entries), headers={}, timestamp=raw.timestamp - 121_000_000))
    finding = audit(h.bus, NS, POLICY).finding("dispositions")
    assert ["keep up" in violation.message for violation in finding.violations] == [True]


def test_what_is_sent_twice_is_the_same_twice() -> None:
    h = world(0).copy()
    seen: set[tuple[bytes, bytes]] = set()
    for record, event in h.rows("raw"):
        number = record.headers.get("source", b""), record.headers.get("source-seq", b"")
        if number in seen:
            h.rewrite(record, event | {"actor": "another"})
            break
        seen.update([number] if number[1] else [])
    finding = audit(h.bus, NS, POLICY).finding("dispositions")
    assert any("numbers twice" in violation.message for violation in finding.violations)


@pytest.mark.parametrize(
    "kind",
    [
        "ledger",
        "weights",
        "resolutions",
        "grants",
        "completions",
        "trajectories",
        "dead-letters",
        "events",
        "decisions",
    ],
)
def test_a_transaction_that_has_ended_on_some_partitions_alone_is_waited_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last record of a topic is still undecided when it is looked at first; whatever names it can be read."""
    h = world(4).copy()
    last = h.rows(kind)[-1][0]
    ends, asked = h.bus.ends, 0

    def half(topic: str) -> dict[int, int]:
        nonlocal asked
        asked += topic == last.topic
        return ends(topic) | ({last.partition: last.offset} if topic == last.topic and asked < 5 else {})

    monkeypatch.setattr(h.bus, "ends", half)
    report = audit(h.bus, NS, POLICY)
    assert report.clean, report.violations[:3]
    assert asked >= 5
    assert not any(MAY_BE_WHOLE in note for note in report.notes)


@pytest.mark.parametrize("stage", ["refine", "seal", "dispatch"])
def test_a_slot_whose_first_turn_comes_while_ends_are_taken_is_no_violation(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    h = world(6).copy()
    topic = h.topic(f"turns.{stage}")
    slot = h.rows(f"turns.{stage}")[-1][0].partition
    ends, asked = h.bus.ends, 0

    def young(name: str) -> dict[int, int]:
        nonlocal asked
        asked += name == topic
        return ends(name) | ({slot: 0} if name == topic and asked == 1 else {})

    monkeypatch.setattr(h.bus, "ends", young)
    assert audit(h.bus, NS, POLICY).finding("outputs").holds


def test_bodies_that_became_no_event_are_not_kept() -> None:
    """Refine may be a day behind."""
    h, body, count = world(3).copy(), 1 << 20, 48
    raw, event = h.rows("raw")[0]
    log = h.bus.logs[raw.topic][raw.partition]
    value = codec.encode("Event", event | {"body": bytes(body)})
    log.entries += [replace(raw, offset=len(log.entries) + n, headers={}, value=value) for n in range(count)]
    tracemalloc.start()
    try:
        report = audit(h.bus, NS, POLICY)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.finding("dispositions").facts["in flight"] == count
    assert peak < body * count / 2


def test_turns_that_are_gone_are_missed() -> None:
    h = world(6).copy()
    for record, _ in h.rows("turns.seal"):
        h.rewrite(record, None)
    assert not audit(h.bus, NS, POLICY).finding("outputs").holds


def test_a_transaction_that_stays_open_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent, "PATIENCE_S", 0.1)
    h = world(5).copy()
    with h.bus.transactor("frozen") as transactor:
        transactor.begin()
        for kind in ("ledger", "raw"):
            transactor.send(Outgoing(h.topic(kind), b"k", b"v", {}, 0))
        transactor.flush()
        report = audit(h.bus, NS, POLICY)
        transactor.abort()
    assert report.clean, report.violations[:3]
    assert sum(MAY_BE_WHOLE in note for note in report.notes) == 2


def test_soft_release_reports_staleness_instead_of_judging_it() -> None:
    h = world(0).copy()
    next(corruption for corruption, _ in CORRUPTIONS if corruption.__name__ == "token_too_old")(h, random.Random(0))
    finding = audit(h.bus, NS, POLICY, release="soft").finding("staleness")
    assert finding.holds
    assert finding.facts["over eta"] == 1
    assert finding.notes


def test_mask_head_counts_what_the_learner_must_have_masked() -> None:
    h = world(0).copy()
    next(corruption for corruption, _ in CORRUPTIONS if corruption.__name__ == "token_too_old")(h, random.Random(0))
    assert not audit(h.bus, NS, POLICY, release="mask-head").finding("staleness").holds
    stale = [v.ids["version"] for v in audit(h.bus, NS, POLICY, release="mask-head").finding("staleness").violations]
    for record, entry in h.rows("ledger"):
        if entry["version"] in stale:
            h.rewrite(record, entry | {"masked_tokens": 1})
    h.forge_ledger()
    assert audit(h.bus, NS, POLICY, release="mask-head").finding("staleness").holds


def lost(h: History, version: int, reason: str) -> list[Place]:
    """The first group of a version is said to be lost; gives its samples."""
    record, entry = h.rows("ledger")[version]
    entry["groups"][0]["lost"] = reason
    h.rewrite(record, entry)
    h.forge_ledger()
    return [Place(**place) for place in entry["groups"][0]["trajectories"]]


def test_a_lost_group_is_noted_and_not_missed() -> None:
    """A ready group that could not be read any more is consumed as masked and named in the ledger."""
    h = world(0).copy()
    for place in lost(h, 3, "gone from the log"):
        h.bus.delete_before(place.topic, place.partition, place.offset + 1)
    report = audit(h.bus, NS, POLICY)
    assert report.clean, report.violations[:3]
    assert report.finding("consumed-once").facts["lost"] == 1


def test_a_group_that_is_there_was_not_lost() -> None:
    h = world(0).copy()
    lost(h, 3, "gone from the log")
    messages = [v.message for v in audit(h.bus, NS, POLICY).finding("figures").violations]
    assert any("is there" in message for message in messages)


def test_slots_under_different_rules_are_noted_unless_one_took_over_from_the_other() -> None:
    h = world(0).copy()
    assert not audit(h.bus, NS, POLICY).finding("events-chain").notes
    rows = [(record, event) for record, event in h.rows("events") if "governance" in event]
    of_one = [(record, event) for record, event in rows if record.partition == 1]
    for record, event in of_one[len(of_one) // 2 :]:
        h.rewrite(record, event | {"governance": event["governance"] | {"policy_version": "2"}})
    h.forge_events()
    finding = audit(h.bus, NS, POLICY).finding("events-chain")
    assert finding.holds
    assert finding.notes == ["slots 0 and 1 are governed by different rules: give every refine the same [governance]"]


@pytest.mark.parametrize(
    "field", ["eligibility", "reason", "residency", "tenant", "policy", "split", "actor", "log_time"]
)
def test_an_envelope_that_was_changed_is_named(field: str) -> None:
    h = world(0).copy()
    record, event = next((r, e) for r, e in h.rows("events") if e["kind"] == "model_call")
    if field in event["governance"]:
        h.rewrite(record, event | {"governance": event["governance"] | {field: "audit_only"}})
    else:
        other = {"log_time": event["log_time"] + 1, "split": "evaluation"}.get(field, "other")
        h.rewrite(record, event | {field: other})
    finding = audit(h.bus, NS, POLICY).finding("events-chain")
    assert any(event["id"] in str(violation) for violation in finding.violations)


def test_rules_that_change_slot_by_slot_are_no_clash() -> None:
    rules = RulesBySlot()
    for time in range(10):
        rules.see(0, "old" if time < 3 else "new", time)
        rules.see(1, "old" if time < 7 else "new", time)
        rules.see(2, "old" if time < 3 else "new", min(time, 2))
    assert list(rules.clashes()) == []
    quiet = RulesBySlot()
    quiet.see(0, "old", 1)
    quiet.see(1, "new", 2)
    quiet.see(1, "new", 3)
    assert list(quiet.clashes()) == []


def test_violations_come_in_the_order_of_time() -> None:
    h = world(0).copy()
    for number in (40, 5):
        record, event = h.rows("events")[number]
        h.rewrite(record, event | {"body": event["body"] + b"?"})
    times = [violation.time for violation in audit(h.bus, NS, POLICY).violations]
    assert times == sorted(times)
    assert times[0] > 0


def test_a_policy_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AuditError, match="no topic"):
        audit(world(0).bus, NS, "nobody")


def test_topics_that_were_never_made_are_said() -> None:
    h = world(0).copy()
    del h.bus.logs[h.topic("evaluations")]
    assert any("evaluations does not exist" in note for note in audit(h.bus, NS, POLICY).notes)


def test_an_empty_deployment_is_nothing_to_audit() -> None:
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec("new.p.weights", 1), TopicSpec("new.raw", 1)])
    with pytest.raises(AuditError, match="nothing to audit"):
        audit(bus, "new", "p")


@pytest.mark.parametrize("width", [80, 100, 130, 200])
def test_a_claim_is_one_line_of_a_narrow_terminal(width: int) -> None:
    console = Console(width=width, file=StringIO(), color_system=None)
    report = audit(world(0).bus, NS, POLICY)
    console.print(render(report, width))
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for law in LAWS:
        assert sum(line.split()[:2] == ["✓", law.name] for line in lines) == 1
    if width < WIDE:
        assert len(lines) < len(LAWS) + len(report.notes) + 12


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    audit(world(0).bus, NS, POLICY, watch=lambda what, done, total: told.append((what, done, total)))
    assert {what for what, _, _ in told} >= {"reading raw[0]", "reading ledger[0]"}
    assert all(done <= total for _, done, total in told)
