"""Ways to break a whole world (`tests.support.history`), each with the audit's claim that must name it.

A corruption changes the logs and says which record must be among those that are named. Where someone who can write
would link a hash chain anew, it does so too: then only the claim itself can tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from consumers.ledger import chained
from infra.bus.base import Place, Record
from infra.chain import event_hash
from schemas import codec
from schemas.arrays import pack, unpack
from tests.support.history import SHARDS, SLOTS, History

Corruption = Callable[[History, random.Random], Place | None]
"""breaks a world and says which record must be among those named"""
Change = Callable[[dict[str, Any]], None]


def pick(h: History, rng: random.Random, kind: str, only: Callable[[dict[str, Any]], bool] = lambda _: True) -> Any:
    """A random record of a topic that fits: (record, decoded)."""
    return rng.choice([(record, value) for record, value in h.rows(kind) if only(value)])


def edit(
    h: History, rng: random.Random, kind: str, change: Callable[[dict[str, Any]], None], /, **wanted: Any
) -> Place:
    record, value = pick(h, rng, kind, lambda row: all(row[name] == is_ for name, is_ in wanted.items()))
    change(value)
    h.rewrite(record, value)
    return record.place


def ledger(h: History, rng: random.Random, change: Change) -> Place:
    """Change a trained version's entry and link the ledger anew, so that only the claim itself can tell."""
    record, value = pick(h, rng, "ledger", lambda row: row["version"] > 0)
    change(value)
    h.rewrite(record, value)
    h.forge_ledger()
    return record.place


def trained(h: History) -> list[tuple[Record, dict[str, Any]]]:
    """Trajectories inside committed versions that train on something."""
    places = {tuple(p.values()) for _, e in h.rows("ledger") for g in e["groups"] for p in g["trajectories"]}
    return [(record, value) for record, value in h.rows("trajectories") if record.place in places and value["tokens"]]


def retoken(
    h: History, rng: random.Random, field: str, change: Callable[[Any, int], None], *, fix: bool = False
) -> Place:
    """Change one element of an array of a trained sample, at a token that trains."""
    record, value = rng.choice(trained(h))
    lineage = value["lineages"][0]
    array = unpack(lineage[field]).copy()
    change(array, int(rng.choice(np.flatnonzero(unpack(lineage["mask"])))))
    lineage[field] = pack(array)
    if fix:
        versions = unpack(lineage["versions"])[unpack(lineage["mask"]).astype(bool)]
        value |= {"v_head": int(versions.min()), "v_tail": int(versions.max())}
    h.rewrite(record, value)
    return record.place


def put(at: int, array: Any, value: float) -> None:
    array[at] = value


# -- one corruption a way of breaking a claim


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
    h.rewrite(record, dict(chained(value, b"\x00" * 32)))  # type: ignore[arg-type]
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


def place_to_nothing(h: History, rng: random.Random) -> Place:
    record, _ = rng.choice(trained(h))
    h.rewrite(record, None)
    return record.place


def place_of_another_group(h: History, rng: random.Random) -> Place:
    """Two ready groups of one partition with their places exchanged, in resolutions and ledger alike."""
    ready = [(r, row) for r, row in h.rows("resolutions") if row["kind"] == "ready"]
    a, b = rng.choice(
        [
            (one, two)
            for one in ready
            for two in ready
            if one[1]["seq"] < two[1]["seq"]
            and one[1]["trajectories"][0]["partition"] == two[1]["trajectories"][0]["partition"]
        ]
    )
    for (record, row), other in ((a, b[1]), (b, a[1])):
        h.rewrite(record, row | {"trajectories": other["trajectories"]})
        for entry_record, entry in h.rows("ledger"):
            for group in entry["groups"]:
                if group["seq"] == row["seq"]:
                    group["trajectories"] = other["trajectories"]
            h.rewrite(entry_record, entry)
    h.forge_ledger()
    return a[0].place


def samples_apart(h: History, rng: random.Random) -> Place:
    """A sample written to another partition than the rest of its group."""
    record, value = pick(h, rng, "completions", lambda row: row["kind"] == "complete")
    sample = next(r for r, _ in h.rows("trajectories") if r.place._asdict() == value["trajectories"][1])
    partition = (sample.partition + 1) % SHARDS
    moved = h.append("trajectories", "Trajectory", codec.decode(sample.value or b"")[1], value["group"], partition)
    h.rewrite(record, value | {"trajectories": [value["trajectories"][0], moved._asdict()]})
    return record.place


def wrong_reward(h: History, rng: random.Random) -> Place:
    return edit(h, rng, "resolutions", lambda row: row.update(rewards=[9.0, 9.0]), kind="ready")


def trajectory_forgotten(h: History, rng: random.Random) -> Place:
    sample, value = rng.choice(h.rows("trajectories"))
    return h.append("trajectories", "Trajectory", value, value["group"], sample.partition)


def sample_completed_twice(h: History, rng: random.Random) -> Place:
    _, value = pick(h, rng, "completions", lambda row: row["kind"] == "complete")
    h.append("completions", "Completion", value, value["group"])
    return Place(**value["trajectories"][0])


def output_lost(h: History, rng: random.Random) -> Place:
    """What a turn says that it wrote is not there; the turn is named."""
    record, _ = pick(h, rng, rng.choice(["trajectories", "completions", "grants"]))
    h.rewrite(record, None)
    stage, slot, number = record.headers["turn"].decode().split("/")
    turns = h.rows(f"turns.{stage}")
    return next(r.place for r, turn in turns if (turn["slot"], turn["number"]) == (int(slot), int(number)))


def output_of_no_turn(h: History, rng: random.Random) -> Place:
    """Someone else writes where only a stage may."""
    _, value = pick(h, rng, "completions", lambda row: row["kind"] == "progress")
    return h.append("completions", "Completion", value, "")


def token_changed(h: History, rng: random.Random) -> Place:
    return retoken(h, rng, "tokens", lambda array, at: put(at, array, array[at] + 1))


def logprob_changed(h: History, rng: random.Random) -> Place:
    return retoken(h, rng, "logprobs", lambda array, at: put(at, array, array[at] * 0.5))


def logprob_not_finite(h: History, rng: random.Random) -> Place:
    return retoken(h, rng, "logprobs", lambda array, at: put(at, array, np.nan))


def version_relabelled(h: History, rng: random.Random) -> Place:
    return retoken(h, rng, "versions", lambda array, at: put(at, array, array[at] + 1), fix=True)


def prompt_trains(h: History, rng: random.Random) -> Place:
    record, value = rng.choice(trained(h))
    lineage = value["lineages"][0]
    mask = unpack(lineage["mask"]).copy()
    mask[0] = 1
    lineage["mask"] = pack(mask)
    h.rewrite(record, value | {"tokens": value["tokens"] + 1})
    return record.place


def arrays_uneven(h: History, rng: random.Random) -> Place:
    record, value = rng.choice(trained(h))
    value["lineages"][0]["versions"] = pack(unpack(value["lineages"][0]["versions"])[:-1])
    h.rewrite(record, value)
    return record.place


def head_misstated(h: History, rng: random.Random) -> Place:
    record, value = rng.choice(trained(h))
    h.rewrite(record, value | {"v_head": value["v_head"] + 1})
    return record.place


def call_lost(h: History, rng: random.Random) -> Place:
    _, value = rng.choice(trained(h))
    place = Place(**rng.choice(value["events"]))
    h.rewrite(h.bus.fetch([place])[0], None)
    return place


def token_too_old(h: History, rng: random.Random) -> Place:
    return old_token(h, rng, lambda version: 0)


def token_from_future(h: History, rng: random.Random) -> Place:
    return old_token(h, rng, lambda version: version)


def old_token(h: History, rng: random.Random, version_of: Callable[[int], int]) -> Place:
    """A token's version rewritten in call and trajectory alike, in a group of a late version."""
    entries = [(record, e) for record, e in h.rows("ledger") if e["version"] > 4]
    found: list[tuple[Record, dict[str, Any], int]] = []
    samples = {record.place: (record, value) for record, value in h.rows("trajectories")}
    for _, entry in entries:
        for group in entry["groups"]:
            for place in group["trajectories"]:
                record, value = samples[Place(**place)]
                if value["tokens"]:
                    found.append((record, value, entry["version"]))
    record, value, version = rng.choice(found)
    lineage = value["lineages"][0]
    versions, mask = unpack(lineage["versions"]).copy(), unpack(lineage["mask"]).astype(bool)
    at = int(np.flatnonzero(mask)[0])
    versions[at] = version_of(version)
    lineage["versions"] = pack(versions)
    value |= {"v_head": int(versions[mask].min()), "v_tail": int(versions[mask].max())}
    h.rewrite(record, value)
    for place in value["events"]:
        source = h.bus.fetch([Place(**place)])[0]
        event = codec.decode(source.value or b"")[1]
        body = codec.decode_body("model_call", event["body"])
        start = body["prefix_len"] + len(unpack(body["prompt_ids"]))
        made = unpack(body["output_versions"]).copy()
        if start <= at < start + len(made) and len(made):
            made[at - start] = version_of(version)
            body["output_versions"] = pack(made)
            h.rewrite(source, event | {"body": codec.encode_body("model_call", body)})
    h.forge_events()
    return record.place


def evaluation_trained(h: History, rng: random.Random) -> Place:
    record, value = rng.choice(trained(h))
    h.rewrite(record, value | {"split": "evaluation"})
    return record.place


def evaluation_in_ledger(h: History, rng: random.Random) -> Place:
    evaluation = h.rows("evaluations")[0][0].place._asdict()
    return ledger(h, rng, lambda entry: entry["groups"][0].update(trajectories=[evaluation, evaluation]))


def ineligible_trained(h: History, rng: random.Random) -> Place:
    record, value = rng.choice(trained(h))
    for place in value["events"]:
        source = h.bus.fetch([Place(**place)])[0]
        event = codec.decode(source.value or b"")[1]
        h.rewrite(source, event | {"governance": event["governance"] | {"eligibility": "audit_only"}})
    return record.place


def tainted_trained(h: History, rng: random.Random) -> Place:
    ids = {value["id"] for _, value in trained(h)}
    record, event = pick(h, rng, "events", lambda row: row["kind"] == "episode_started" and row["trajectory"] in ids)
    h.rewrite(record, event | {"governance": event["governance"] | {"reason": "step_gap", "eligibility": "audit_only"}})
    return record.place


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


CORRUPTIONS: list[tuple[Corruption, str]] = [
    (bad_bytes, "records"),
    (version_left_out, "versions"),
    (wrong_parent, "versions"),
    (other_digest, "versions"),
    (entry_left_out, "versions"),
    (seq_skipped, "tiles"),
    (batch_too_small, "tiles"),
    (entry_changed, "ledger-chain"),
    (entry_unlinked, "ledger-chain"),
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
    (place_to_nothing, "places"),
    (place_of_another_group, "places"),
    (samples_apart, "places"),
    (wrong_reward, "places"),
    (sample_completed_twice, "places"),
    (trajectory_forgotten, "outputs"),
    (output_lost, "outputs"),
    (output_of_no_turn, "outputs"),
    (token_changed, "tokens"),
    (logprob_changed, "tokens"),
    (logprob_not_finite, "tokens"),
    (version_relabelled, "tokens"),
    (prompt_trains, "tokens"),
    (arrays_uneven, "tokens"),
    (head_misstated, "tokens"),
    (call_lost, "tokens"),
    (token_too_old, "staleness"),
    (token_too_old, "min-version"),
    (token_from_future, "staleness"),
    (evaluation_trained, "eligible"),
    (evaluation_in_ledger, "eligible"),
    (ineligible_trained, "eligible"),
    (tainted_trained, "eligible"),
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
