"""An ended episode to a reward that refine and seal take."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from millrace.infra.config import Governance
from millrace.infra.log.base import Record
from millrace.infra.log.blobs import ClaimStore
from millrace.schemas import codec
from millrace.streams.refine.stage import Refine
from millrace.streams.reward.judge import Evaluator, Judge
from millrace.streams.reward.pool import Verdict
from millrace.testing.events import Episode
from tests.support.folding import Bench, of


class Always:
    """A pool that knows its verdict."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.asked: list[tuple] = []

    async def judge(self, task, output, episode):
        self.asked.append((json.loads(task), output, episode))
        return self.verdict


GOOD = Verdict(0.75, {"part": 1.0}, "ok", None, None)


def record(event, **headers):
    head = {"kind": event["kind"].encode()} | {k: v.encode() for k, v in headers.items()}
    return Record("ns.events", 0, 3, b"local/g", codec.encode("Event", event), head, 0)


def judge(verdict=GOOD, source="verifier"):
    pool = Always(verdict)
    return pool, Judge(pool, Evaluator(source, "exact", "1"), "p", clock=lambda: 99)


def ended(**fields):
    episode = Episode("r1", ticket=5, size=2, sample=1, task='{"answer": "x"}', **fields)
    episode.start()
    return episode.end(output="said")


async def test_the_episodes_of_another_policy_are_left_to_its_own_judges():
    pool, judging = judge()
    assert await judging(record(ended(policy="other"))) is None
    assert pool.asked == []


async def test_an_ended_episode_becomes_a_reward_in_raw():
    pool, judging = judge()
    out = await judging(record(ended(), traceparent="00-t"))
    assert (out.topic, out.key, out.partition) == ("ns.raw", b"local/g", None)
    event = codec.decode_as("Event", out.value)
    body = codec.decode_body("reward", event["body"])
    assert (body["target"], body["value"], body["components"], body["source"]) == (
        "r1",
        0.75,
        {"part": 1.0},
        "verifier",
    )
    assert (event["source_seq"], event["group"], event["actor"]) == (None, "5", "evaluator")
    assert out.headers["kind"] == b"reward"
    assert out.headers["traceparent"] == b"00-t"
    assert "source-seq" not in out.headers
    (asked,) = pool.asked
    assert asked[:2] == ({"answer": "x"}, "said")
    assert asked[2]["status"] == "completed"


async def test_an_episode_without_a_task_is_asked_of_no_verifier():
    """As every plain production call is: its verdict says why it has no value."""
    pool, judging = judge()
    episode = Episode("r1", ticket=5, size=2, sample=1, task="")
    episode.start()
    out = await judging(record(episode.end()))
    body = codec.decode_body("reward", codec.decode_as("Event", out.value)["body"])
    assert (body["value"], body["failure"], pool.asked) == (None, "no_task", [])


async def test_a_verdict_that_no_record_can_hold_has_a_failure_with_the_same_ids():
    _, judging = judge(Verdict(1.0, {}, None, "x" * 5_000_000, None))
    event = record(ended())
    one, instead = await judging(event), judging.too_large(event)
    bodies = [codec.decode_body("reward", codec.decode_as("Event", out.value)["body"]) for out in (one, instead)]
    assert (bodies[1]["value"], bodies[1]["failure"], bodies[1]["critique"]) == (None, "too_large", None)
    assert bodies[0]["reward_id"] == bodies[1]["reward_id"]
    assert judging.too_large(record(ended(policy="other"))) is None


async def test_a_reward_too_large_for_raw_goes_as_a_claim(tmp_path):
    claims = ClaimStore(str(tmp_path))
    judging = Judge(Always(GOOD._replace(critique="so " * 500_000)), Evaluator("verifier", "exact", "1"), "p", claims)
    out = await judging(record(ended()))
    assert codec.name_of(out.value) == "Claim"
    event = codec.decode_as("Event", claims.load(codec.decode_as("Claim", out.value)))
    assert codec.decode_body("reward", event["body"])["value"] == 0.75


async def test_judging_twice_makes_the_same_reward():
    _, judging = judge()
    event = ended()
    assert await judging(record(event)) == await judging(record(event))


async def test_a_failure_has_a_label_and_no_value():
    _, judging = judge(Verdict(None, {}, None, None, "timeout"))
    out = await judging(record(ended()))
    body = codec.decode_body("reward", codec.decode_as("Event", out.value)["body"])
    assert (body["value"], body["failure"]) == (None, "timeout")


async def test_refine_takes_what_a_judge_writes():
    _, judging = judge()
    event = ended()
    out = await judging(record(event) if event["group"] == "g" else replace(record(event), key=b"local/5"))
    bench = Bench(Refine(Governance(), [], slots=1), clock=1)
    emits = bench.record("raw", out.key, "", out.value)
    (taken,) = of(emits, "Event")
    assert taken["governance"]["eligibility"] == "aggregate"


@pytest.mark.parametrize("what", ["another kind", "another source", "a sub-agent", "junk", "sealed"])
async def test_what_is_not_ours_is_left_alone(what):
    _, judging = judge(source="other" if what == "another source" else "verifier")
    event = ended()
    if what == "another kind":
        event = Episode("r2").start()
    if what == "a sub-agent":
        event["trajectory"] = "child"
    if what == "sealed":
        event |= {"body_encoding": "sealed", "body": b"cipher"}
    given = record(event)
    if what == "junk":
        given = replace(given, value=b"junk")
    assert await judging(given) is None


async def test_with_a_key_a_reward_carries_the_proof_that_refine_asks_for():
    judging = Judge(Always(GOOD), Evaluator("verifier", "exact", "1"), "p", key="k")
    out = await judging(record(ended()))
    bench = Bench(Refine(Governance(), [], slots=1, reward_key="k"), clock=1)
    headers = {name: value.decode() for name, value in out.headers.items()}
    assert not of(bench.record("raw", "local/5", "", out.value, **headers), "DeadLetter")
    assert of(bench.record("raw", "local/5", "", out.value), "DeadLetter")[0]["reason"] == "unproven_reward"
