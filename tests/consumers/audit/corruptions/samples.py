"""Samples broken: their places, their turns' outputs, their tokens, their age, their right to train."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from millrace.infra.log.base import Place, Record
from millrace.schemas import codec
from millrace.schemas.arrays import pack, unpack
from tests.consumers.audit.corruptions.tools import Corruption, edit, ledger, pick, put, retoken, trained
from tests.support.history import History
from tests.support.history_log import SHARDS


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


BROKEN: list[tuple[Corruption, str]] = [
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
]
"""each with the law that must name it"""
