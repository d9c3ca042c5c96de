"""Refine: what becomes of every raw record."""

from __future__ import annotations

import pytest

from millrace.infra.config import Governance, Tenant
from millrace.infra.errors import DetectorError
from millrace.infra.log.topics import partition_of
from millrace.infra.proof import HEADER, proof_of
from millrace.schemas import arrays, codec
from millrace.schemas.chain import START, event_hash
from millrace.streams.refine.detectors.base import Detector, Hit
from millrace.streams.refine.stage import AFTER_END, Refine
from millrace.testing.events import Episode
from tests.support.folding import Bench, of

NOW = 1_700_000_000_000_000
SECRET = "hunter22"


class Words(Detector):
    """Flags SECRET; fails on `boom`."""

    name = "words"

    def version(self) -> str:
        return "words-1"

    def scan(self, text: bytes) -> list[Hit]:
        if b"boom" in text:
            raise DetectorError("boom")
        at = text.find(SECRET.encode())
        hits = [] if at < 0 else [Hit(at, at + len(SECRET), "secret", "words", True)]
        at = text.find(b"a@b.example")
        return hits + ([] if at < 0 else [Hit(at, at + 11, "email", "words", False)])


def bench(**tenants: Tenant) -> Bench:
    rules = Governance(tenants=tenants or {"local": Tenant()})
    return Bench(Refine(rules, [Words()], slots=1, max_bytes=1 << 20), clock=NOW)


def send(b: Bench, episode: Episode, event: dict) -> dict:
    """The record that came out for an event."""
    out = [e for e in b.record("raw", episode.key, "Event", event) if e.name in ("Event", "DeadLetter")]
    assert len(out) == 1
    return dict(out[0].record)


def test_with_a_key_a_reward_counts_only_if_a_holder_of_the_key_signed_it():
    b = Bench(Refine(Governance(), [Words()], slots=1, reward_key="k"), clock=NOW)
    episode = Episode("r1")
    b.record("raw", episode.key, "Event", episode.start())
    for n, (key, reason) in enumerate([("k", None), ("other", "unproven_reward"), (None, "unproven_reward")]):
        for judge in ("judge", None):
            event = episode.reward(1.0, judge=judge, n=n)
            headers = {} if key is None else {HEADER: proof_of(key, event["hash"])}
            letters = of(b.record("raw", episode.key, "Event", event, **headers), "DeadLetter")
            assert [letter["reason"] for letter in letters] == ([reason] if reason else [])


def test_no_gateway_may_say_that_a_replay_made_a_reward():
    """Whatever it says: only a source without numbers may, and with a key only its holders."""
    episode = Episode("r1")
    for key, judge, reasons in (("", "judge", []), ("", None, ["live_replay"]), ("k", "judge", ["unproven_reward"])):
        b = Bench(Refine(Governance(), [Words()], slots=1, reward_key=key), clock=NOW)
        letters = of(b.record("raw", episode.key, "Event", episode.reward(1.0, judge=judge, replay="r")), "DeadLetter")
        assert [letter["reason"] for letter in letters] == reasons


def test_an_event_is_passed_on_with_time_chain_and_governance():
    b, episode = bench(), Episode("r1")
    first, second = episode.start(), episode.call("a")
    one, two = send(b, episode, first), send(b, episode, second)
    assert one["log_time"] == NOW
    assert one["source_hash"] == first["hash"]
    assert one["source_place"] == {"topic": "w.raw", "partition": 0, "offset": 1}
    assert one["body"] == first["body"]
    assert one["prev_hash"] == START
    assert one["hash"] == event_hash(START, one)
    assert two["prev_hash"] == one["hash"]
    assert two["hash"] == event_hash(one["hash"], two)
    assert two["governance"]["eligibility"] == "aggregate"
    assert two["governance"]["redaction"] == "none_needed"


def test_headers_let_readers_route_without_decoding():
    b, episode = bench(), Episode("r1")
    event = episode.start()
    came = {"source": "gateway-0", "source-seq": "0", "source-epoch": "0", "traceparent": "00-x"}
    emit = b.record("raw", episode.key, "Event", event, **came)[-1]
    wanted = {"id": event["id"], "kind": "episode_started", "policy": "p", "group": "r1", "trajectory": "r1"}
    assert (
        wanted | {"source": "gateway-0", "source-seq": "0", "source-epoch": "0", "traceparent": "00-x"} == emit.headers
    )


BAD = {
    "empty": (lambda e: None, "empty"),
    "garbage": (lambda e: b"not avro", "undecodable"),
    "foreign schema": (lambda e: b"\xc3\x01" + b"\x01" * 8 + b"x", "unknown_schema"),
    "truncated": (lambda e: codec.encode("Event", e)[:-3], "undecodable"),
    "another record": (lambda e: codec.encode("Progress", {"stage": "x", "slot": 0, "time": 1}), "not_an_event"),
    "no body": (lambda e: codec.encode("Event", e | {"body": b""}), "missing_body"),
    "another body": (lambda e: codec.encode("Event", e | {"kind": "gap"}), "undecodable_body"),
    "foreign body": (lambda e: codec.encode("Event", e | {"body": b"\xc3\x01" + b"\x01" * 8}), "unknown_body"),
    "other key": (lambda e: codec.encode("Event", e | {"tenant": "mallory"}), "wrong_key"),
    "tampered": (lambda e: codec.encode("Event", e | {"step": 7}), "bad_hash"),
    "oversize": (lambda e: b"\xc3\x01" + bytes(1 << 20), "oversize"),
    "claim of nothing": (
        lambda e: codec.encode("Claim", {"uri": "file:///x", "sha256": "0", "size": 1, "name": "Event"}),
        "claim_lost",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_event_becomes_one_dead_letter_without_content(case):
    make, code = BAD[case]
    b, episode = bench(), Episode("r1")
    event = episode.start()
    out = of(b.record("raw", episode.key, "Event", make(event)), "DeadLetter")
    assert [letter["reason"] for letter in out] == [code]
    assert out[0]["place"] == {"topic": "w.raw", "partition": 0, "offset": 1}
    assert of(b.emits, "Event") == []
    # The slot goes on.
    assert send(b, episode, event)["kind"] == "episode_started"


def test_a_key_that_is_not_text_is_refused():
    b, episode = bench(), Episode("r1")
    out = of(b.record("raw", b"\xff\xfe", "Event", episode.start()), "DeadLetter")
    assert [letter["reason"] for letter in out] == ["wrong_key"]


def test_a_record_on_a_foreign_partition_is_refused():
    b = Bench(Refine(Governance(), [], slots=8), slot=0, clock=NOW)
    episode = next(e for n in range(100) if partition_of((e := Episode(f"r{n}")).key, 8) != 0)
    out = of(b.record("raw", episode.key, "Event", episode.start()), "DeadLetter")
    assert [letter["reason"] for letter in out] == ["wrong_partition"]


def test_a_trajectory_cannot_change_its_group():
    b, episode = bench(), Episode("r1")
    send(b, episode, episode.start())
    episode.group = "other"
    assert send(b, episode, episode.call("a"))["reason"] == "wrong_group"


@pytest.mark.parametrize("hole", ["step", "link", "split", "gap"])
def test_a_flawed_chain_flags_the_rest_of_the_trajectory(hole):
    b, episode = bench(), Episode("r1")
    send(b, episode, episode.start())
    if hole == "step":
        episode.call("lost")
    elif hole == "link":
        episode.hash = b"another" * 4
    elif hole == "split":
        episode.split = "evaluation"
    else:
        send(b, episode, episode.event("gap", {"missed": 1, "reason": "disk full"}))
    reason = {"step": "step_gap", "link": "chain_broken", "split": "split_changed", "gap": "gap"}[hole]
    for event in (episode.call("a"), episode.end()):
        governance = send(b, episode, event)["governance"]
        assert (governance["eligibility"], governance["reason"]) == ("audit_only", reason)


def test_judges_belong_to_no_chain():
    b, episode = bench(), Episode("r1")
    send(b, episode, episode.start())
    reward = send(b, episode, episode.reward(1.0))
    assert reward["governance"]["eligibility"] == "aggregate"
    assert send(b, episode, episode.end())["governance"]["eligibility"] == "aggregate"


def test_a_secret_in_a_call_withholds_it_and_its_lineage():
    b, episode = bench(), Episode("r1")
    send(b, episode, episode.start())
    clean = send(b, episode, episode.call("a", text="hello"))
    dirty = send(b, episode, episode.call("b", keep=5, text=f"my password is {SECRET}, ok"))
    after = send(b, episode, episode.call("c", keep=10, text="hello again"))
    other = send(b, episode, episode.call("d", lineage="l1", text="elsewhere"))
    assert clean["governance"]["eligibility"] == "aggregate"
    assert dirty["governance"]["redaction"] == "applied"
    assert dirty["governance"]["counts"] == {"secret": 1}
    assert dirty["governance"]["findings"] == [
        {"leaf": "request/messages/0/content", "start": 15, "end": 23, "kind": "secret", "detector": "words"}
    ]
    body = codec.decode_body("model_call", dirty["body"])
    assert SECRET.encode() not in dirty["body"]
    assert b"my password is [REDACTED:secret], ok" in body["request"]
    assert not body["trainable"]
    for field in ("prompt_ids", "output_ids", "output_logprobs", "output_versions"):
        assert len(arrays.unpack(body[field])) == 0
    assert (after["governance"]["eligibility"], after["governance"]["reason"]) == ("audit_only", "withheld_context")
    assert len(arrays.unpack(codec.decode_body("model_call", after["body"])["output_ids"])) == 0
    assert other["governance"]["eligibility"] == "aggregate"


def test_a_secret_in_a_tool_result_is_redacted_and_its_call_stays():
    b, episode = bench(), Episode("r1")
    send(b, episode, episode.start())
    body = {"call_id": "c", "name": "sh", "status": "ok", "content": SECRET, "tool_version": None, "latency_us": 1}
    out = send(b, episode, episode.event("tool_result", body))
    assert codec.decode_body("tool_result", out["body"])["content"] == "[REDACTED:secret]"
    assert out["governance"]["eligibility"] == "aggregate"


def test_what_was_put_into_the_context_is_looked_at_too():
    b, episode = bench(), Episode("r1")
    send(b, episode, episode.start())
    injected = [{"kind": "memory", "id": "m1", "version": "4"}, {"kind": "memory", "id": SECRET, "version": ""}]
    body = {"summary": "s", "plan_step": None, "confidence": None, "injected": injected}
    out = send(b, episode, episode.event("internal_state", body))
    found = codec.decode_body("internal_state", out["body"])["injected"]
    assert [each["id"] for each in found] == ["m1", "[REDACTED:secret]"]


def test_a_secret_in_the_task_withholds_the_whole_attempt():
    b, episode = bench(), Episode("r1", task=f'{{"prompt": "say {SECRET}"}}')
    out = send(b, episode, episode.start())
    assert (out["governance"]["eligibility"], out["governance"]["reason"]) == ("audit_only", "redacted")
    assert SECRET.encode() not in out["body"]


def test_labels_do_not_block():
    b, episode = bench(), Episode("r1")
    send(b, episode, episode.start())
    out = send(b, episode, episode.call("a", text="write to a@b.example"))
    assert out["governance"]["counts"] == {"email": 1}
    assert out["governance"]["redaction"] == "none_needed"
    assert out["governance"]["eligibility"] == "aggregate"


def test_a_detector_that_fails_fails_closed():
    b, episode = bench(), Episode("r1")
    send(b, episode, episode.start())
    out = send(b, episode, episode.call("a", text="boom goes the detector"))
    assert (out["governance"]["eligibility"], out["governance"]["reason"]) == ("audit_only", "detectors_failed")
    assert out["governance"]["redaction"] == "failed"
    assert b"goes the detector" not in out["body"]
    assert len(arrays.unpack(codec.decode_body("model_call", out["body"])["output_ids"])) == 0


def test_a_sealed_body_cannot_be_scanned_and_never_trains():
    b, episode = bench(), Episode("r1")
    event = episode.event("gap", {"missed": 1, "reason": ""}, body_encoding="sealed", body=b"cipher")
    out = send(b, episode, event)
    assert out["body"] == b"cipher"
    assert out["governance"]["eligibility"] == "audit_only"


def test_tenants_nobody_knows_are_recorded_only():
    b, episode = bench(), Episode("r1", tenant="stranger")
    out = send(b, episode, episode.start())
    assert (out["governance"]["eligibility"], out["governance"]["reason"]) == ("audit_only", "unknown_tenant")


def test_a_denied_tenant_leaves_no_content():
    b, episode = bench(local=Tenant(eligibility="denied")), Episode("r1")
    send(b, episode, episode.start())
    out = send(b, episode, episode.call("a", text="private words"))
    assert out["governance"]["eligibility"] == "denied"
    assert b"private words" not in out["body"]


def test_labels_of_a_trajectory_hold_from_there_on():
    b, episode = bench(), Episode("r1")
    send(b, episode, episode.start())
    labels = {"classification": "internal", "labels": ["no-train"], "scopes": []}
    send(b, episode, episode.event("security_label", labels))
    out = send(b, episode, episode.call("a"))
    assert (out["governance"]["eligibility"], out["governance"]["reason"]) == ("audit_only", "label")


def test_each_second_the_slot_says_its_time():
    b = bench()
    b.turn()
    b.clock = NOW + 1_000_000
    b.turn()
    assert [p["time"] for p in of(b.emits, "Progress")] == [NOW, NOW + 1_000_000]
    assert all(e.partition == 0 for e in b.emits)


def test_state_of_a_trajectory_is_forgotten_after_its_end():
    b, episode = bench(), Episode("r1")
    for event in (episode.start(), episode.end()):
        send(b, episode, event)
    assert b.state.keys("t/")
    b.clock = NOW + AFTER_END + 1
    b.turn()
    assert b.state.keys("t/") == []
