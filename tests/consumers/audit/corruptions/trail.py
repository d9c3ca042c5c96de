"""The trail of every event broken: turns, hash chains, dispositions, bytes."""

from __future__ import annotations

import random

from millrace.infra.log.base import Place
from millrace.schemas.chain import event_hash
from tests.consumers.audit.corruptions.tools import Corruption, edit, pick
from tests.support.history import History
from tests.support.history_log import SLOTS


def turn_lost(h: History, rng: random.Random) -> Place:
    kind = rng.choice(["turns.refine", "turns.seal", "turns.dispatch"])
    slot = rng.randrange(h.bus.partitions(h.topic(kind)))
    rows = [record for record, value in h.rows(kind) if value["slot"] == slot]
    at = rng.randrange(len(rows) - 1)
    h.rewrite(rows[at], None)
    return rows[at + 1].place


def offset_twice(h: History, rng: random.Random) -> Place:
    kind = rng.choice(["turns.refine", "turns.seal", "turns.dispatch"])
    record, value = pick(h, rng, kind, lambda row: row["number"] > 0)
    span = value["ranges"][0]
    value["ranges"] = [span | {"first": 0}, *value["ranges"][1:]]
    h.rewrite(record, value)
    return record.place


def turn_miscounts(h: History, rng: random.Random) -> Place:
    record, value = pick(h, rng, "turns.seal")
    value["ranges"][0]["count"] += 1
    h.rewrite(record, value)
    return record.place


def event_changed(h: History, rng: random.Random) -> Place:
    return edit(h, rng, "events", lambda event: event.update(body=event["body"][:-1] + b"?"))


def event_taken_out(h: History, rng: random.Random) -> Place:
    slot = rng.randrange(SLOTS)
    rows = [record for record, _ in h.rows("events") if record.partition == slot]
    at = rng.randrange(len(rows) - 1)
    h.rewrite(rows[at], None)
    return rows[at + 1].place


def raw_hash_forgotten(h: History, rng: random.Random) -> Place:
    record, event = pick(h, rng, "events")
    h.rewrite(record, event | {"source_hash": b"\x00" * 32})
    return record.place


def raw_changed(h: History, rng: random.Random) -> Place:
    governed = {Place(**event["source_place"]) for _, event in h.rows("events")}
    record, event = rng.choice([(r, e) for r, e in h.rows("raw") if r.place in governed])
    h.rewrite(record, event | {"body": event["body"] + b"\x00"})
    return record.place


def capture_unlinked(h: History, rng: random.Random) -> Place:
    """An event of a trajectory forged with a hash that fits itself, but not the one before it."""
    governed = {Place(**e["source_place"]): (r, e) for r, e in h.rows("events") if e["source_seq"] is not None}
    record, raw = rng.choice([(r, e) for r, e in h.rows("raw") if r.place in governed])
    raw["prev_hash"] = b"\x07" * 32
    raw["hash"] = event_hash(raw["prev_hash"], raw)
    h.rewrite(record, raw)
    source, event = governed[record.place]
    h.rewrite(
        source, event | {"source_hash": raw["hash"], "governance": event["governance"] | {"eligibility": "tenant_only"}}
    )
    return record.place


def raw_dropped(h: History, rng: random.Random) -> Place:
    """refine folded a raw event and wrote nothing."""
    record, event = pick(h, rng, "events", lambda row: row["kind"] == "reward")
    h.rewrite(record, None)
    h.forge_events()
    return Place(**event["source_place"])


def raw_twice(h: History, rng: random.Random) -> Place:
    record, event = pick(h, rng, "events")
    place = h.append("events", "Event", event, f"local/{event['group']}", record.partition)
    h.forge_events()
    return place


def repeated_and_let_through(h: History, rng: random.Random) -> Place:
    """What was sent twice became two events."""
    known = {Place(**event["source_place"]): event for _, event in h.rows("events")}
    kept = {event["source_seq"]: event for event in known.values() if event["source_seq"] is not None}
    twice = [(r, e) for r, e in h.rows("raw") if r.place not in known and e["source_seq"] in kept]
    record, raw = rng.choice(twice)
    event = kept[raw["source_seq"]] | {"source_place": record.place._asdict()}
    h.append("events", "Event", event, record.key.decode(), record.partition)
    h.forge_events()
    return record.place


def dead_and_alive(h: History, rng: random.Random) -> Place:
    _, event = pick(h, rng, "events")
    letter = h.rows("dead-letters")[0][1] | {"place": event["source_place"]}
    return h.append("dead-letters", "DeadLetter", letter, "x", event["source_place"]["partition"])


def event_from_nowhere(h: History, rng: random.Random) -> Place:
    record, event = pick(h, rng, "events")
    nowhere = event["source_place"] | {"offset": 10_000}
    h.rewrite(record, event | {"source_place": nowhere})
    return record.place


def duplicate_uncounted(h: History, rng: random.Random) -> Place:
    record, value = pick(h, rng, "turns.refine", lambda row: row["duplicates"] > 0)
    span = value["ranges"][0]
    value["ranges"][0] = span | {"skipped": span["skipped"] - 1, "count": span["count"] + 1}
    h.rewrite(record, value)
    return record.place


def bad_bytes(h: History, rng: random.Random) -> Place:
    record, _ = pick(h, rng, rng.choice(["grants", "resolutions", "trajectories", "ledger", "events"]))
    h.rewrite(record, (record.value or b"")[:-3])
    return record.place


BROKEN: list[tuple[Corruption, str]] = [
    (bad_bytes, "records"),
    (turn_lost, "turns"),
    (offset_twice, "turns"),
    (turn_miscounts, "turns"),
    (event_changed, "events-chain"),
    (event_taken_out, "events-chain"),
    (raw_hash_forgotten, "capture-chain"),
    (raw_changed, "capture-chain"),
    (capture_unlinked, "capture-chain"),
    (raw_dropped, "dispositions"),
    (raw_twice, "dispositions"),
    (dead_and_alive, "dispositions"),
    (repeated_and_let_through, "dispositions"),
    (event_from_nowhere, "dispositions"),
    (duplicate_uncounted, "dispositions"),
]
"""each with the law that must name it"""
