"""Everything that can be asked about, told from a whole world."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from millrace.consumers.tell.command import explain_in
from millrace.consumers.tell.topics import PolicyTopics
from millrace.infra.log.topics import partition_of
from millrace.schemas import codec
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.history_records import POLICY


@cache
def world() -> History:
    return History(0)


def told(wanted: object) -> str:
    return explain_in(PolicyTopics(world().bus, NS, POLICY), str(wanted)).text


def events(kind: str, **body: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    found = [(e, codec.decode_body(e["kind"], e["body"])) for _, e in world().rows("events") if e["kind"] == kind]
    return [(e, b) for e, b in found if all(b[name] == value for name, value in body.items())]


def first_trained() -> dict[str, Any]:
    ready = {g["group"] for _, entry in world().rows("ledger") for g in entry["groups"]}
    return next(value for _, value in world().rows("trajectories") if value["group"] in ready and value["tokens"])


def test_a_ticket_that_trained_is_told_from_grant_to_version() -> None:
    entry = world().rows("ledger")[1][1]
    group = next(g for g in entry["groups"] if g["ticket"] is not None)
    text = told(group["ticket"])
    assert f"ticket {group['ticket']} trained version 1 (from version 0, seq {group['seq']})" in text
    for word in ("granted as ticket", "model call", "sealed as sample", "group complete", "resolved as ready"):
        assert word in text
    assert f"{world().topic('ledger')}[0]@" in text, "places are given"


def test_every_kind_of_id_of_one_sample_leads_to_its_version() -> None:
    sample = first_trained()
    event, body = next((e, b) for e, b in events("model_call") if e["trajectory"] == sample["id"])
    reward = next(b for e, b in events("reward") if e["trajectory"] == sample["id"])
    ids = [sample["id"], sample["group"], sample["attempt"], event["id"], body["response_id"], body["call_id"]]
    for wanted in [*ids, body["lineage"], reward["reward_id"]]:
        assert "trained version" in told(wanted).splitlines()[0], wanted


def test_the_event_asked_for_is_told_in_full_and_its_siblings_in_a_line() -> None:
    sample = first_trained()
    text = told(sample["id"])
    assert text.count("session ") == 3
    assert text.count("started: task") == 1


@pytest.mark.parametrize(("kind", "words"), [("expired", "lease ran out"), ("failed", "every attempt failed")])
def test_what_never_became_ready_says_why(kind: str, words: str) -> None:
    resolution = next(row for _, row in world().rows("resolutions") if row["kind"] == kind)
    line = told(resolution["ticket"]).splitlines()[0]
    assert words in line
    assert kind in line


def test_an_outstanding_ticket_waits() -> None:
    resolved = {row["ticket"] for _, row in world().rows("resolutions")}
    ticket = next(row["ticket"] for _, row in world().rows("grants") if row["ticket"] not in resolved)
    assert "nobody has answered yet" in told(ticket)


def test_evaluations_never_train() -> None:
    assert "never trains" in told(world().rows("evaluations")[0][1]["id"])


def test_a_withheld_reply_says_so() -> None:
    event, body = next((e, b) for e, b in events("model_call") if not b["trainable"])
    line = told(body["response_id"]).splitlines()[0]
    assert "kept for audit only" in line
    assert "redacted" in line
    assert event["id"] != body["response_id"]


def test_a_dead_letter_says_where_it_lies_and_why() -> None:
    letter = world().rows("dead-letters")[0][1]
    text = told(letter["id"])
    assert "undecodable" in text
    assert f"{letter['place']['topic']}[{letter['place']['partition']}]@{letter['place']['offset']}" in text


def test_a_repetition_is_no_mystery() -> None:
    h = world()
    twice = [record for record, _ in h.rows("raw")]
    key = next(r.headers["trajectory"] for r in twice if sum(o.headers["id"] == r.headers["id"] for o in twice) > 1)
    assert "sent twice, skipped here" in told(key.decode())


def test_an_unsolicited_group_and_a_prompt() -> None:
    wild = next(row for _, row in world().rows("resolutions") if row["kind"] == "ready" and not row["solicited"])
    assert "unsolicited" in told(wild["group"])
    grant = world().rows("grants")[0][1]
    text = told(grant["prompt_id"])
    assert f"prompt {grant['prompt_id']} was granted 1 time" in text
    assert f"ticket {grant['ticket']}" in text


def test_what_is_not_refined_yet_waits() -> None:
    h = world().copy()
    h.speak(h.episode("group-new", 0, None), "gap", {"missed": 1, "reason": "disk full"})
    event = h.rows("raw")[-1][1] if h.rows("raw")[-1][1]["group"] == "group-new" else h.rows("raw")
    wanted = event["id"] if isinstance(event, dict) else next(e["id"] for _, e in event if e["group"] == "group-new")
    assert "not yet refined" in explain_in(PolicyTopics(h.bus, NS, POLICY), wanted).text


@pytest.mark.parametrize("wanted", ["nobody", "99999", ""])
def test_an_unknown_id_is_said_to_be_unknown(wanted: str) -> None:
    assert "Nothing is known of" in told(wanted)


def test_a_namespace_without_topics_knows_nothing() -> None:
    text, known = explain_in(PolicyTopics(world().bus, "elsewhere", POLICY), "1")
    assert "Nothing is known of" in text
    assert not known
    assert explain_in(PolicyTopics(world().bus, NS, POLICY), "1").is_known


@pytest.mark.parametrize("wanted", ["²", "٣", "9" * 5000, "\udcff", "\ud800x", "-1", "\x00"])
def test_what_names_nothing_is_said_to_name_nothing(wanted: str) -> None:
    assert explain_in(PolicyTopics(world().bus, NS, POLICY), wanted) == (
        explain_in(PolicyTopics(world().bus, NS, POLICY), wanted).text,
        False,
    )


@pytest.mark.parametrize("name", ["²", "٣", "9" * 200])
def test_a_group_may_be_called_by_any_digits(name: str) -> None:
    made = world().copy()
    _, sample = next((r, s) for r, s in made.rows("trajectories") if s["ticket"] is None)
    partition = partition_of(name, made.bus.partitions(made.topic("trajectories")))
    made.append("trajectories", "Trajectory", {**sample, "group": name, "id": "named"}, name, partition)
    told = explain_in(PolicyTopics(made.bus, NS, POLICY), name)
    assert told.is_known
    assert f"sealed as sample {sample['sample']}" in told.text


def test_odd_numbers_of_an_event_are_told_as_such() -> None:
    made = world().copy()
    record, event = next((r, e) for r, e in made.rows("events") if e["kind"] == "model_call")
    body = codec.decode_body("model_call", event["body"])
    odd = {**body, "output_versions": {"dtype": "int64", "data": b"ragged"}}
    made.rewrite(record, {**event, "body": codec.encode_body("model_call", odd)})
    for log in made.bus.logs[made.topic("ledger")]:
        log.entries = [one and replace(one, timestamp=2**62) for one in log.entries]
    text = explain_in(PolicyTopics(made.bus, NS, POLICY), event["id"]).text
    assert "(its tokens cannot be read)" in text
    assert "–" in text, "a time that no calendar has"
