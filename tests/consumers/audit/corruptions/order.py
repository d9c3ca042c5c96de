"""Versions, what trained them, groups, tickets and settings, broken."""

from __future__ import annotations

import random

from millrace.consumers.scores import with_id
from millrace.infra.log.base import Place
from millrace.infra.log.history.ledger import chain_entry
from millrace.schemas import codec
from tests.consumers.audit.corruptions.tools import Corruption, edit, ledger, pick
from tests.support.history import History
from tests.support.history_log import SLOTS


def version_left_out(h: History, rng: random.Random) -> Place:
    record, _ = pick(h, rng, "weights", lambda row: 0 < row["version"] < 6)
    h.rewrite(record, None)
    return next(r.place for r, entry in h.rows("weights") if r.offset > record.offset)


def wrong_parent(h: History, rng: random.Random) -> Place:
    record, value = pick(h, rng, "weights", lambda row: row["version"] > 1)
    h.rewrite(record, value | {"parent": value["version"] - 2})
    return record.place


def other_digest(h: History, rng: random.Random) -> Place:
    return ledger(h, rng, lambda entry: entry.update(digest="0" * 64))


def entry_left_out(h: History, rng: random.Random) -> Place:
    record, value = h.rows("ledger")[-1]
    h.rewrite(record, None)
    return next(r.place for r, event in h.rows("weights") if event["version"] == value["version"])


def seq_skipped(h: History, rng: random.Random) -> Place:
    record, value = pick(h, rng, "ledger", lambda row: row["version"] > 1)
    h.rewrite(record, value | {"seq_lo": value["seq_lo"] + 1, "groups": value["groups"][1:]})
    h.forge_ledger()
    return record.place


def batch_too_small(h: History, rng: random.Random) -> Place:
    record, value = h.rows("ledger")[-1]
    h.rewrite(record, value | {"seq_hi": value["seq_hi"] - 1, "groups": value["groups"][:-1]})
    h.forge_ledger()
    weights, event = h.rows("weights")[-1]
    h.rewrite(weights, event | {"seq_hi": value["seq_hi"] - 1})
    return record.place


def entry_changed(h: History, rng: random.Random) -> Place:
    return edit(h, rng, "ledger", lambda entry: entry["metrics"].update(loss=0.0))


def entry_unlinked(h: History, rng: random.Random) -> Place:
    record, value = pick(h, rng, "ledger", lambda row: row["version"] > 0)
    h.rewrite(record, dict(chain_entry(value, b"\x00" * 32)))  # type: ignore[arg-type]
    return record.place


def seq_twice(h: History, rng: random.Random) -> Place:
    record, value = pick(h, rng, "resolutions", lambda row: row["kind"] == "ready" and row["seq"] > 0)
    h.rewrite(record, value | {"seq": value["seq"] - 1})
    return record.place


def trained_twice(h: History, rng: random.Random) -> Place:
    """A version trains once more on a group of the one before, under another seq."""
    entries = [(r, e) for r, e in h.rows("ledger") if e["groups"]]
    at = rng.randrange(1, len(entries))
    (_, before), (record, entry) = entries[at - 1], entries[at]
    taken = dict(before["groups"][0]) | {"seq": entry["groups"][0]["seq"]}
    h.rewrite(record, entry | {"groups": [taken, *entry["groups"][1:]]})
    h.forge_ledger()
    return record.place


def trained_unresolved(h: History, rng: random.Random) -> Place:
    record, _ = pick(h, rng, "resolutions", lambda row: row["kind"] == "ready")
    seq = codec.decode(record.value or b"")[1]["seq"]
    h.rewrite(record, None)
    return next(r.place for r, e in h.rows("ledger") if any(g["seq"] == seq for g in e["groups"]))


def resolved_twice(h: History, rng: random.Random) -> Place:
    _, value = pick(h, rng, "resolutions", lambda row: row["kind"] == "ready")
    late = value | {"kind": "expired", "seq": None, "trajectories": [], "tokens": [], "rewards": []}
    return h.append("resolutions", "Resolution", late, value["group"])


def group_twice(h: History, rng: random.Random) -> Place:
    _, value = pick(h, rng, "resolutions", lambda row: row["kind"] == "ready")
    late = value | {"kind": "declined", "seq": None, "ticket": None, "trajectories": [], "tokens": [], "rewards": []}
    return h.append("resolutions", "Resolution", late, value["group"])


def grant_lost(h: History, rng: random.Random) -> Place:
    granted = {row["ticket"] for _, row in h.rows("grants")}
    _, resolution = pick(
        h, rng, "resolutions", lambda row: row["kind"] == "ready" and row["solicited"] and row["ticket"] in granted
    )
    for record, value in h.rows("grants"):
        if value["ticket"] == resolution["ticket"]:
            h.rewrite(record, None)
    return next(r.place for r, row in h.rows("resolutions") if row["ticket"] == resolution["ticket"])


def ticket_skipped(h: History, rng: random.Random) -> Place:
    ticket = h.tickets + 1 + rng.randrange(3)
    grant = h.rows("grants")[0][1] | {"ticket": ticket, "min_version": h.version, "deadline": h.version + h.eta}
    return h.append("grants", "Grant", grant, str(ticket), ticket % SLOTS)


def terms_changed(h: History, rng: random.Random) -> Place:
    return edit(h, rng, "grants", lambda grant: grant.update(min_version=grant["min_version"] + 1), round=1)


def granted_and_unsolicited(h: History, rng: random.Random) -> Place:
    return edit(h, rng, "resolutions", lambda row: row.update(solicited=False), kind="ready", solicited=True)


def deadline_stretched(h: History, rng: random.Random) -> Place:
    return edit(h, rng, "grants", lambda grant: grant.update(deadline=grant["deadline"] + 1), round=0)


def batch_off_boundary(h: History, rng: random.Random) -> Place:
    record, value = pick(h, rng, "resolutions", lambda row: row["setting"] and row["setting"]["name"] == "batch")
    h.rewrite(record, value | {"setting": value["setting"] | {"from_seq": value["setting"]["from_seq"] - 1}})
    return record.place


def setting_without_decision(h: History, rng: random.Random) -> Place:
    record, _ = pick(h, rng, "decisions")
    decision = codec.decode(record.value or b"")[1]["id"]
    h.rewrite(record, None)
    return next(
        r.place for r, row in h.rows("resolutions") if row["setting"] and row["setting"]["decision"] == decision
    )


def score_changed(h: History, rng: random.Random) -> Place:
    record, value = pick(h, rng, "scores")
    h.rewrite(record, value | {"tasks": "easier.jsonl"})
    return record.place


def score_invented(h: History, rng: random.Random) -> Place:
    """Named by its content, as anyone can."""
    record, value = pick(h, rng, "scores")
    h.rewrite(record, with_id(value | {"mean": 1.0}))  # type: ignore[arg-type]
    return record.place


def score_of_another_version(h: History, rng: random.Random) -> Place:
    record, value = pick(h, rng, "scores")
    h.rewrite(record, with_id(value | {"digest": "0" * 64}))  # type: ignore[arg-type]
    return record.place


def beginning_taken(h: History, rng: random.Random) -> Place:
    """The first records of a topic that retention never takes are deleted."""
    topic = h.topic(rng.choice(["weights", "ledger", "scores", "decisions"]))
    start = next(record.offset for record in h.bus.read(topic, 0)) + 1
    h.bus.delete_before(topic, 0, start)
    return Place(topic, 0, start)


BROKEN: list[tuple[Corruption, str]] = [
    (beginning_taken, "beginnings"),
    (version_left_out, "versions"),
    (wrong_parent, "versions"),
    (other_digest, "versions"),
    (entry_left_out, "versions"),
    (seq_skipped, "tiles"),
    (batch_too_small, "tiles"),
    (entry_changed, "ledger-chain"),
    (entry_unlinked, "ledger-chain"),
    (score_changed, "scores"),
    (score_invented, "scores"),
    (score_of_another_version, "scores"),
    (seq_twice, "consumed-once"),
    (trained_twice, "consumed-once"),
    (trained_unresolved, "consumed-once"),
    (resolved_twice, "resolved-once"),
    (group_twice, "resolved-once"),
    (grant_lost, "tickets"),
    (ticket_skipped, "tickets"),
    (terms_changed, "tickets"),
    (granted_and_unsolicited, "tickets"),
    (deadline_stretched, "settings"),
    (batch_off_boundary, "settings"),
    (setting_without_decision, "settings"),
]
"""each with the law that must name it"""
