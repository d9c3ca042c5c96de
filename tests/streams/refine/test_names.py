"""Names that hold a secret: replaced so that they still join, and whose secret nobody finds by trying."""

from __future__ import annotations

import os
import stat

import pytest

from millrace.infra.config import Governance, Tenant
from millrace.infra.log.base import Record
from millrace.infra.log.topics import partition_of
from millrace.infra.stages.fold import Fold
from millrace.infra.stages.state import SlotState
from millrace.schemas import codec
from millrace.streams.refine.detectors.vectorscan import Vectorscan
from millrace.streams.refine.names import FILE, Replacements, is_plain, key_in
from millrace.streams.refine.stage import Refine
from millrace.testing.events import Episode
from tests.streams.refine.planted import NOW, SECRETS, ends, fold, sent, stage

GROUP = f"case {SECRETS['phone']}"
VECTORSCAN = Vectorscan()


def test_the_same_name_is_replaced_alike_and_only_under_the_same_key_and_tenant():
    one = Replacements(b"a", 8)
    assert one.of("t", GROUP) == Replacements(b"a", 8).of("t", GROUP)
    assert len({one.of("t", GROUP), one.of("u", GROUP), Replacements(b"b", 8).of("t", GROUP)}) == 3
    assert is_plain(one.of("t", GROUP))


@pytest.mark.parametrize("slots", [1, 2, 7, 64])
def test_a_replaced_group_belongs_on_the_partition_of_the_group(slots):
    for n in range(20):
        name = f"{GROUP} {n}"
        made = Replacements(b"a", slots).of("t", name)
        assert partition_of(f"t/{made}", slots) == partition_of(f"t/{name}", slots)


def test_a_replaced_group_still_joins_its_episodes_and_trains():
    one, two = Episode("r1", group=GROUP), Episode("r2", group=GROUP)
    raws = [sent(event) for episode in (one, two) for event in (episode.start(), episode.call("a"), episode.end())]
    emits, _ = fold(stage(VECTORSCAN), raws)
    events = [emit.record for emit in emits if emit.name == "Event"]
    assert len(events) == 6
    assert len({event["group"] for event in events}) == 1
    assert {emit.key for emit in emits if emit.name == "Event"} == {f"local/{events[0]['group']}"}
    assert {event["governance"]["eligibility"] for event in events} == {"aggregate"}
    assert {event["governance"]["redaction"] for event in events} == {"applied"}


def test_a_reward_for_a_replaced_group_names_it_as_its_events_do():
    episode = Episode("r1", group=GROUP)
    raws = [sent(episode.start()), sent(episode.reward(1.0, judge=None, target=GROUP, target_kind="group"))]
    emits, _ = fold(stage(VECTORSCAN), raws)
    start, reward = [emit.record for emit in emits if emit.name == "Event"]
    assert codec.decode_body("reward", reward["body"])["target"] == start["group"]


def test_a_tenant_whose_name_holds_a_secret_is_refused():
    emits, written = fold(stage(VECTORSCAN), [sent(Episode("r1", tenant=SECRETS["github"]).start())])
    assert ends(emits) == ["DeadLetter"]
    assert not [part for part in written if SECRETS["github"].encode() in part]


def test_a_source_whose_name_holds_a_secret_is_remembered_by_a_replacement():
    secret = SECRETS["github"]
    event = Episode("r1").start()
    record = Record("w.raw", 0, 0, *sent(event, source=secret, **{"source-seq": "0"}), 0)
    state = SlotState(0, strict=True)
    refine = Fold(stage(VECTORSCAN), state)
    first = refine.turn([record], NOW)
    written = [part for key, value in state.changes() for part in (key, value or b"")]
    assert not [part for part in written if secret.encode() in part]
    again = Fold(stage(VECTORSCAN), state).turn([record], NOW + 1)
    assert (first.duplicates, again.duplicates) == (0, 1)


def test_a_tenant_may_have_labelled_kinds_removed():
    rules = Governance(tenants={"local": Tenant(remove=("email",))})
    event = Episode("r1", task="write to jane.doe@example.com").start()
    for refine, kept in ((stage(VECTORSCAN), True), (Refine(rules, [VECTORSCAN], slots=1), False)):
        _, written = fold(refine, [sent(event)])
        assert any(b"jane.doe@example.com" in part for part in written) is kept


def test_the_key_is_made_once_and_for_its_owner_alone(tmp_path):
    first = key_in(tmp_path / "home")
    assert len(first) == 32
    assert key_in(tmp_path / "home") == first
    assert os.listdir(tmp_path / "home") == [FILE]
    assert stat.S_IMODE((tmp_path / "home" / FILE).stat().st_mode) == 0o600


OWNERS = {
    "its own policy": ({"p": "local"}, "tenant_only", "tenant:local"),
    "another tenant's policy": ({"p": "acme"}, "audit_only", "other_tenants_policy"),
    "a policy of nobody": ({}, "audit_only", "other_tenants_policy"),
    "another policy": ({"q": "local"}, "audit_only", "other_tenants_policy"),
}


@pytest.mark.parametrize("case", OWNERS)
def test_tenant_only_trains_the_policies_of_its_tenant_alone(case):
    owners, eligibility, reason = OWNERS[case]
    rules = Governance(tenants={"local": Tenant(eligibility="tenant_only")})
    episode = Episode("r1")
    emits, _ = fold(Refine(rules, [], slots=1, owners=owners), [sent(episode.start()), sent(episode.call("a"))])
    found = [emit.record["governance"] for emit in emits if emit.name == "Event"]
    assert {(row["eligibility"], row["reason"]) for row in found} == {(eligibility, reason)}


def test_the_owner_of_a_policy_changes_no_other_eligibility():
    for rule in ("denied", "audit_only", "aggregate"):
        rules = Governance(tenants={"local": Tenant(eligibility=rule)})
        emits, _ = fold(Refine(rules, [], slots=1, owners={"p": "acme"}), [sent(Episode("r1").start())])
        assert [emit.record["governance"]["eligibility"] for emit in emits if emit.name == "Event"] == [rule]
