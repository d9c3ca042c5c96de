"""Forgeries of a whole history by someone who can write anywhere: what is changed is changed wherever it is said, and
hash chains are linked anew. Each with a law that must name it, or with `folds` where only folding again can tell."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from millrace.infra.log.base import Place, Record
from millrace.schemas import codec
from millrace.schemas.arrays import pack, unpack
from tests.consumers.audit.corruptions.generator import relink
from tests.support.whole import Whole

Forgery = Callable[[Whole, random.Random], None]
Value = dict[str, Any]
Row = tuple[Record, Value]


def write(w: Whole, record: Record, value: Mapping[str, Any] | None) -> None:
    """Put another value where a record lies; None takes it out."""
    entries = w.bus.logs[record.topic][record.partition].entries
    name = codec.name_of(record.value or b"")
    entries[record.offset] = None if value is None else replace(record, value=codec.encode(name, value))


def append(w: Whole, like: Record, value: Mapping[str, Any] | None = None) -> None:
    """One more record behind the others of a partition."""
    entries = w.bus.logs[like.topic][like.partition].entries
    data = like.value if value is None else codec.encode(codec.name_of(like.value or b""), value)
    entries.append(replace(like, offset=len(entries), value=data))


def pick(w: Whole, rng: random.Random, kind: str, only: Callable[[Value], bool] = lambda _: True) -> Row:
    return rng.choice([(record, value) for record, value in w.rows(kind) if only(value)])


def trained(w: Whole, rng: random.Random) -> Row:
    """A sample of a committed version, of a lineage of several calls where there is one."""
    places = {tuple(p.values()) for _, e in w.rows("ledger") for g in e["groups"] for p in g["trajectories"]}
    rows = [(r, v) for r, v in w.rows("trajectories") if tuple(r.place) in places and v["tokens"]]
    long = [(r, v) for r, v in rows if len(v["lineages"][0]["calls"]) > 1]
    return rng.choice(long or rows)


def turn_of(w: Whole, record: Record) -> Row:
    """The turn that wrote a record."""
    stage, slot, number = record.headers["turn"].decode().rsplit("/", 2)
    kind = f"turns.{stage.rpartition('.')[2]}"
    return next((r, t) for r, t in w.rows(kind) if (t["slot"], t["number"]) == (int(slot), int(number)))


def uncount(w: Whole, record: Record) -> None:
    """Take a record out, and out of what its turn counts."""
    turn, value = turn_of(w, record)
    topic = record.topic.partition(".")[2]
    left = value["emitted"][topic] - 1
    emitted = {name: count for name, count in value["emitted"].items() if name != topic} | (
        {topic: left} if left else {}
    )
    write(w, turn, value | {"emitted": emitted})
    write(w, record, None)


def everywhere(w: Whole, sample: Row, field: str, value: Any) -> None:
    """Change what completion and resolution repeat of a sample."""
    place = sample[0].place._asdict()
    for kind in ("completions", "resolutions"):
        for record, row in w.rows(kind):
            if place in row["trajectories"]:
                row[field][row["trajectories"].index(place)] = value
                write(w, record, row)


def entry(w: Whole, rng: random.Random, change: Callable[[Value], None]) -> None:
    record, value = pick(w, rng, "ledger", lambda row: row["version"] > 0)
    change(value)
    write(w, record, value)
    relink(w, "ledger")


def event(w: Whole, rng: random.Random, change: Callable[[Value], None], only: Callable[[Value], bool]) -> None:
    """Change an event in `events`, chain and all."""
    record, value = pick(w, rng, "events", only)
    change(value)
    write(w, record, value)
    relink(w, "events")


# -- seen by the laws of old


def entries_swapped(w: Whole, rng: random.Random) -> None:
    (one, a), (two, b) = rng.sample([row for row in w.rows("ledger") if row[1]["version"]], 2)
    write(w, one, b)
    write(w, two, a)


def entries_swapped_and_chained(w: Whole, rng: random.Random) -> None:
    entries_swapped(w, rng)
    relink(w, "ledger")


def groups_exchanged(w: Whole, rng: random.Random) -> None:
    (one, a), (two, b) = rng.sample([row for row in w.rows("ledger") if row[1]["version"]], 2)
    a["groups"][0], b["groups"][0] = b["groups"][0], a["groups"][0]
    write(w, one, a)
    write(w, two, b)
    relink(w, "ledger")


def lineage_shifted(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    lineage = value["lineages"][0]
    lineage["tokens"] = pack(np.roll(unpack(lineage["tokens"]), 1))
    write(w, record, value)


def completion_renamed(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "completions", lambda row: row["kind"] == "complete")
    write(w, record, value | {"group": "another"})


def negative_dropped(w: Whole, rng: random.Random) -> None:
    write(w, pick(w, rng, "resolutions", _negative)[0], None)


def seqs_with_a_gap(w: Whole, rng: random.Random) -> None:
    for record, row in w.rows("resolutions"):
        if row["seq"]:
            write(w, record, row | {"seq": row["seq"] + 1})


def last_turn_emptied(w: Whole, rng: random.Random) -> None:
    value = [row for _, row in w.rows("turns.seal") if row["emitted"]][-1]
    for kind in ("trajectories", "completions", "evaluations", "dead-letters"):
        for out in list(w.records(kind)):
            if out.headers.get("turn") == f"seal/{value['slot']}/{value['number']}".encode():
                write(w, out, None)


def grant_repeated(w: Whole, rng: random.Random) -> None:
    append(w, pick(w, rng, "grants")[0])


def ready_without_completion(w: Whole, rng: random.Random) -> None:
    uncount(w, pick(w, rng, "completions", lambda row: row["kind"] == "complete")[0])


def _negative(row: Value) -> bool:
    return row["kind"] not in ("ready", "setting")


# -- the log and its turns


def negative_forgotten(w: Whole, rng: random.Random) -> None:
    uncount(w, pick(w, rng, "resolutions", _negative)[0])


def letter_dropped(w: Whole, rng: random.Random) -> None:
    write(w, pick(w, rng, "dead-letters", lambda row: row["stage"] == "seal")[0], None)


def letter_forged(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "dead-letters", lambda row: row["stage"] == "seal")
    other = pick(w, rng, "events")[0]
    append(w, record, value | {"id": "forged", "place": other.place._asdict()})


def turn_time_back(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "turns.seal", lambda row: row["number"] > 2)
    write(w, record, value | {"now": value["now"] - 3600_000_000})


def log_time_back(w: Whole, rng: random.Random) -> None:
    event(w, rng, lambda e: e.update(log_time=e["log_time"] - 3600_000_000), lambda e: e["step"] > 0)


def episode_forgotten(w: Whole, rng: random.Random) -> None:
    """A sealed group that trained nothing, as if seal had never closed it."""
    sealed = [row for row in w.rows("resolutions") if row[1]["kind"] == "declined" and row[1]["trajectories"]]
    record, value = rng.choice(sealed)
    for place in value["trajectories"]:
        uncount(w, w.bus.fetch([Place(**place)])[0])  # type: ignore[arg-type]
    for found, row in w.rows("completions"):
        if row["group"] == value["group"]:
            uncount(w, found)
    uncount(w, record)


def last_turn_gone(w: Whole, rng: random.Random) -> None:
    write(w, w.rows("turns.dispatch")[-1][0], None)


def offsets_ahead(w: Whole, rng: random.Random) -> None:
    """A slot whose committed offset was moved on: it folds what comes after records that it never saw."""
    record, value = w.rows("turns.seal")[-1]
    slot = value["slot"]
    like = [found for found in w.records("events") if found.partition == slot][-1]
    append(w, like)
    append(w, like)
    last = len(w.bus.logs[like.topic][slot].entries) - 1
    span = {"topic": "events", "partition": slot, "first": last, "last": last, "count": 1, "skipped": 0}
    append(w, record, value | {"number": value["number"] + 1, "ranges": [span], "emitted": {}})


def newest_version_rolled_back(w: Whole, rng: random.Random) -> None:
    for kind in ("weights", "ledger"):
        write(w, w.rows(kind)[-1][0], None)


# -- samples and rewards


def reward_changed_everywhere(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    value["reward"] += 0.25
    value["rewards"][0]["value"] += 0.25
    write(w, record, value)
    everywhere(w, (record, value), "rewards", value["reward"])


def reward_unlike_its_judgements(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    write(w, record, value | {"reward": value["reward"] + 0.25})
    everywhere(w, (record, value), "rewards", value["reward"] + 0.25)


def reward_from_nowhere(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    value["rewards"].append(value["rewards"][0] | {"reward_id": "forged", "value": 0.5})
    write(w, record, value | {"reward": value["reward"] + 0.5})
    everywhere(w, (record, value), "rewards", value["reward"] + 0.5)


def live_reward(event: dict[str, Any]) -> bool:
    """Whether an event is a reward that may count: one that a replay made counts for no sample."""
    return event["kind"] == "reward" and codec.decode_body("reward", event["body"])["replay"] is None


def reward_of_another_principal(w: Whole, rng: random.Random) -> None:
    """The verifier's word, sent by somebody else: in raw, in events and in their headers."""
    record, value = pick(w, rng, "events", live_reward)
    source = w.bus.fetch([Place(**value["source_place"])])[0]
    assert source is not None
    for at, row in ((record, value), (source, codec.decode(source.value or b"")[1])):
        headers = dict(at.headers) | {"source": b"an agent"}
        w.bus.logs[at.topic][at.partition].entries[at.offset] = replace(
            at, headers=headers, value=codec.encode("Event", row | {"source": "an agent"})
        )
    relink(w, "events")


def sample_of_another_tenant(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    write(w, record, value | {"tenant": "another"})


def sample_of_another_policy(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    write(w, record, value | {"policy": "another"})


def token_masked(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    lineage = value["lineages"][0]
    mask = unpack(lineage["mask"]).copy()
    mask[int(np.flatnonzero(mask)[-1])] = 0
    lineage["mask"] = pack(mask)
    used = unpack(lineage["versions"])[mask.astype(bool)]
    value |= {"tokens": value["tokens"] - 1, "v_head": int(used.min()), "v_tail": int(used.max())}
    write(w, record, value)


def sample_masked(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    write(w, record, value | {"lineages": [], "tokens": 0, "length": 0, "v_head": -1, "v_tail": -1})
    everywhere(w, (record, value), "tokens", 0)


def last_reply_lost(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    lineage = value["lineages"][0]
    call = w.bus.fetch([Place(**value["events"][-1])])[0]
    assert call is not None
    body = codec.decode_body("model_call", codec.decode(call.value or b"")[1]["body"])
    keep = body["prefix_len"]
    for field in ("tokens", "mask", "logprobs", "versions"):
        lineage[field] = pack(unpack(lineage[field])[:keep])
    mask = unpack(lineage["mask"]).astype(bool)
    used = unpack(lineage["versions"])[mask]
    value |= {"events": value["events"][:-1], "length": keep, "tokens": int(mask.sum())}
    value |= {"v_head": int(used.min(initial=99)), "v_tail": int(used.max(initial=-1))}
    lineage["calls"] = lineage["calls"][:-1]
    write(w, record, value)
    everywhere(w, (record, value), "tokens", keep)


def sample_of_other_calls(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    _, other = pick(w, rng, "trajectories", lambda row: row["id"] != value["id"] and row["tokens"] > 0)
    taken = ("events", "lineages", "v_head", "v_tail", "tokens", "length", "excluded")
    write(w, record, value | {field: other[field] for field in taken})
    everywhere(w, (record, value), "tokens", other["length"])


def two_samples_of_one_episode(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    _, other = pick(w, rng, "trajectories", lambda row: row["id"] != value["id"])
    write(w, record, value | {"id": other["id"]})


def failed_episode_trained(w: Whole, rng: random.Random) -> None:
    record, value = trained(w, rng)
    write(w, record, value | {"status": "failed"})


def sample_dropped_from_group(w: Whole, rng: random.Random) -> None:
    """The last sample of a trained group, out of completion, resolution and ledger."""
    wanted = {g["group"] for _, e in w.rows("ledger") for g in e["groups"] if len(g["trajectories"]) > 1}
    group = rng.choice(sorted(wanted))
    for kind in ("completions", "resolutions"):
        for record, row in w.rows(kind):
            if row["group"] == group:
                cut = {field: row[field][:-1] for field in ("trajectories", "tokens", "rewards")}
                cut |= {"samples": row["samples"][:-1]} if kind == "completions" else {}
                write(w, record, row | cut)
    for record, row in w.rows("ledger"):
        for one in row["groups"]:
            if one["group"] == group:
                one["trajectories"] = one["trajectories"][:-1]
        write(w, record, row)
    relink(w, "ledger")


# -- versions and their ledger


def reward_mean_lies(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e["metrics"].update(reward_mean=e["metrics"]["reward_mean"] + 0.5))


def tokens_lie(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e["metrics"].update(tokens_trainable=e["metrics"]["tokens_trainable"] + 5))


def shares_lie(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e["ranks"][0].update(samples=e["ranks"][0]["samples"] + 1))


def eta_lies(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e.update(eta=e["eta"] + 1))


def said_to_be_lost(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e["groups"][0].update(lost="gone from the log"))


def version(w: Whole, rng: random.Random, change: Callable[[Value], None]) -> None:
    record, value = pick(w, rng, "weights", lambda row: row["version"] > 0)
    change(value)
    write(w, record, value)


def adapter_called_full(w: Whole, rng: random.Random) -> None:
    version(w, rng, lambda v: v["files"].update({"adapter_config.json": "0" * 64}))


def full_called_adapter(w: Whole, rng: random.Random) -> None:
    version(w, rng, lambda v: v.update(mode="adapter"))


def tokenizer_changed(w: Whole, rng: random.Random) -> None:
    version(w, rng, lambda v: v.update(tokenizer_hash="0" * 64))


def uri_elsewhere(w: Whole, rng: random.Random) -> None:
    version(w, rng, lambda v: v.update(uri="/elsewhere/" + v["uri"].rpartition("/")[2]))


# -- grants, resolutions, settings


def short_called_ready(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "completions", lambda row: row["kind"] == "complete")
    write(w, record, value | {"kind": "short", "reason": "0: no reward"})


def expired_too_early(w: Whole, rng: random.Random) -> None:
    """A ticket that became ready is said to have expired, before its lease ended."""
    record, row = pick(w, rng, "resolutions", lambda row: row["kind"] == "ready" and row["solicited"])
    blank: Value = {"seq": None, "trajectories": [], "tokens": [], "rewards": [], "v_head": -1, "v_tail": -1}
    write(w, record, row | blank | {"kind": "expired", "group": "", "reason": "its lease ended"})


def prompt_that_never_was(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "grants", lambda row: row["round"] == 0)
    write(w, record, value | {"prompt_id": "never"})
    for found, row in w.rows("resolutions"):
        if row["ticket"] == value["ticket"]:
            write(w, found, row | {"prompt_id": "never"})


def min_version_lowered(w: Whole, rng: random.Random) -> None:
    record, row = pick(w, rng, "resolutions", lambda row: row["solicited"] and row["min_version"] > 0)
    write(w, record, row | {"min_version": row["min_version"] - 1})


def deadline_moved(w: Whole, rng: random.Random) -> None:
    record, row = pick(w, rng, "resolutions", lambda row: row["solicited"] and row["kind"] == "ready")
    write(w, record, row | {"deadline": row["deadline"] + 1})


def setting_unlike_its_decision(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "decisions", lambda row: row["name"] in ("eta", "batch"))
    write(w, record, value | {"value": json.dumps(json.loads(value["value"]) + 1)})


def envelope_changed(w: Whole, rng: random.Random) -> None:
    """What no hash of an event covers."""
    event(w, rng, lambda e: e.update(actor="another"), lambda e: e["kind"] == "model_call")


def judge_not_governed(w: Whole, rng: random.Random) -> None:
    event(w, rng, lambda e: e.update(governance=None), lambda e: e["kind"] == "reward")


ALREADY: list[tuple[Forgery, str]] = [
    (entries_swapped, "ledger-chain"),
    (entries_swapped_and_chained, "tiles"),
    (groups_exchanged, "tiles"),
    (lineage_shifted, "tokens"),
    (completion_renamed, "agreements"),
    (negative_dropped, "outputs"),
    (seqs_with_a_gap, "consumed-once"),
    (last_turn_emptied, "outputs"),
    (grant_repeated, "tickets"),
    (ready_without_completion, "agreements"),
]
"""what the laws about order named before"""
UNSEEN: list[tuple[Forgery, str]] = [
    (negative_forgotten, "folds"),
    (reward_changed_everywhere, "episodes"),
    (reward_unlike_its_judgements, "episodes"),
    (reward_from_nowhere, "episodes"),
    (reward_of_another_principal, "episodes"),
    (letter_dropped, "outputs"),
    (letter_forged, "outputs"),
    (expired_too_early, "agreements"),
    (turn_time_back, "times"),
    (log_time_back, "times"),
    (sample_of_another_tenant, "episodes"),
    (sample_of_another_policy, "episodes"),
    (reward_mean_lies, "figures"),
    (tokens_lie, "figures"),
    (shares_lie, "figures"),
    (eta_lies, "figures"),
    (adapter_called_full, "weights"),
    (full_called_adapter, "weights"),
    (tokenizer_changed, "weights"),
    (uri_elsewhere, "weights"),
    (token_masked, "tokens"),
    (sample_masked, "tokens"),
    (last_reply_lost, "episodes"),
    (sample_of_other_calls, "episodes"),
    (two_samples_of_one_episode, "episodes"),
    (failed_episode_trained, "episodes"),
    (short_called_ready, "agreements"),
    (prompt_that_never_was, "agreements"),
    (min_version_lowered, "agreements"),
    (deadline_moved, "agreements"),
    (setting_unlike_its_decision, "agreements"),
    (episode_forgotten, "folds"),
    (said_to_be_lost, "figures"),
    (sample_dropped_from_group, "agreements"),
    (last_turn_gone, "folds"),
    (offsets_ahead, "turns"),
    (newest_version_rolled_back, "turns"),
]
"""what no law named"""
MORE: list[tuple[Forgery, str]] = [(envelope_changed, "envelopes"), (judge_not_governed, "envelopes")]
"""of laws that those do not touch"""
