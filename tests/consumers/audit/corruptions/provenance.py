"""Forgeries of who trained, what was asked for, and what refine replaced; hash chains are linked anew."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from tests.consumers.audit.corruptions.forgeries import Forgery, entry, event, pick, write
from tests.consumers.audit.corruptions.generator import relink
from tests.support.whole import Whole


def configuration_changed(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e.update(config_hash="another"))


def configuration_told_otherwise(w: Whole, rng: random.Random) -> None:
    """In every entry, so that the leader says the same all along."""
    for record, value in w.rows("ledger"):
        if value["config"]:
            write(w, record, value | {"config": value["config"].replace("0.001", "0.002")})
    relink(w, "ledger")


def reference_exchanged(w: Whole, rng: random.Random) -> None:
    for record, value in w.rows("ledger"):
        if value["models"]:
            write(w, record, value | {"models": {"reference": "cd"}})
    relink(w, "ledger")


def device_changed(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e.update(device="another"))


def cell_changed(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e["groups"][0].update(cell=1))


def cell_forgotten(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: [group.update(cell=-1) for group in e["groups"]])  # type: ignore[func-returns-value]


def library_changed(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e["libraries"].update(torch="3"))


def cpu_changed(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e.update(cpu="another"))


def generation_falls(w: Whole, rng: random.Random) -> None:
    newest = max(row["version"] for _, row in w.rows("ledger"))
    record, value = pick(w, rng, "ledger", lambda row: row["version"] == newest)
    write(w, record, value | {"generation": 0})
    relink(w, "ledger")


def layout_changed(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e.update(layout="torch:d2"))


def beginning_trained(w: Whole, rng: random.Random) -> None:
    """Version 0 comes from a model directory."""
    record, value = pick(w, rng, "ledger", lambda row: row["version"] == 0)
    write(w, record, value | {"code_hash": "another"})
    relink(w, "ledger")


def parent_in_another_policy(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "weights", lambda row: row["version"] > 0)
    write(w, record, value | {"parent_policy": "another"})


def called_a_branch(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "weights", lambda row: row["version"] == 0)
    write(w, record, value | {"parent_policy": "another"})


def selected_where_nobody_selects(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "weights", lambda row: row["version"] > 0)
    write(w, record, value | {"selection": "SELECT 1", "selection_digest": "0" * 64, "selection_places": 1})


def address_changed(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "weights", lambda row: row["version"] > 0)
    write(w, record, value | {"broadcast": "http://another:1"})


def size_changed(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "weights", lambda row: row["version"] > 0)
    write(w, record, value | {"full_bytes": value["full_bytes"] + 1})


def sent_bytes_lie(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e["metrics"].update(sent_bytes=10.0))


def part_of_a_step_counted(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e["metrics"].update(steps=1.25))


def fewer_steps_than_none_skipped(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e["metrics"].update(steps_skipped=-1.0))


def time_below_zero(w: Whole, rng: random.Random) -> None:
    entry(w, rng, lambda e: e["metrics"].update(timings_step=-2.5))


def decision_of_another(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "decisions")
    write(w, record, value | {"author": "another"})


def decision_for_another_reason(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "decisions")
    write(w, record, value | {"reason": "another"})


def decision_at_another_time(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "decisions")
    write(w, record, value | {"time": value["time"] + 1})


def decision_named_anew(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "decisions", lambda row: row["name"] == "sealing")
    write(w, record, value | {"id": "another"})


def decision_for_every_policy(w: Whole, rng: random.Random) -> None:
    """Its id is made anew, its key stays."""
    record, value = pick(w, rng, "decisions", lambda row: row["name"] == "sealing")
    write(w, record, value | {"policy": None})
    relink(w, "decisions")


def decision_under_another_key(w: Whole, rng: random.Random) -> None:
    record, _ = pick(w, rng, "decisions")
    entries = w.bus.logs[record.topic][record.partition].entries
    entries[record.offset] = replace(record, key=b"another")


def eta_of_the_beginning_lies(w: Whole, rng: random.Random) -> None:
    record, value = pick(w, rng, "ledger", lambda row: row["version"] == 0)
    write(w, record, value | {"eta": value["eta"] + 1})
    relink(w, "ledger")


def grants_headers_changed(w: Whole, rng: random.Random) -> None:
    """What the grant says stays; folded again it is no grant under other settings."""
    record, _ = pick(w, rng, "grants")
    headers = dict(record.headers) | {"ticket": b"99"}
    w.bus.logs[record.topic][record.partition].entries[record.offset] = replace(record, headers=headers)


def task_exchanged(w: Whole, rng: random.Random) -> None:
    """Of a prompt that stands there once: where two share an id, only a fold tells which of them a grant took."""
    granted = {row["prompt_id"] for _, row in w.rows("grants")}
    ids = Counter(row["id"] for _, row in w.rows("prompts"))
    record, value = pick(w, rng, "prompts", lambda row: row["id"] in granted and ids[row["id"]] == 1)
    write(w, record, value | {"task": '{"another": 1}'})


def sources_of_a_prompt_changed(w: Whole, rng: random.Random) -> None:
    """Folded again it looks as if the policy's own sources had been changed."""
    granted = {row["prompt_id"] for _, row in w.rows("grants")}
    record, value = pick(w, rng, "prompts", lambda row: row["id"] in granted and row["awaits"])
    write(w, record, value | {"awaits": []})


def range_before_its_topic(w: Whole, rng: random.Random) -> None:
    """What lies before a topic's beginning is no loss by retention."""
    record, value = pick(w, rng, "turns.refine", lambda row: row["ranges"] and row["ranges"][0]["first"] == 0)
    value["ranges"][0]["first"] = -1
    write(w, record, value)


def name_replaced_without_a_word(w: Whole, rng: random.Random) -> None:
    """Only an event whose governance says that something was taken out may have another name than was captured."""
    change = {"attempt": "redacted-" + "a" * 32}
    event(w, rng, lambda e: e.update(change), lambda e: e["governance"]["redaction"] == "none_needed")


def another_name_than_a_replacement(w: Whole, rng: random.Random) -> None:
    event(w, rng, lambda e: e.update(attempt="another"), lambda e: e["governance"]["redaction"] == "applied")


def older_hash(w: Whole, rng: random.Random) -> None:
    event(w, rng, lambda e: e.update(hash_version=1), lambda e: e["kind"] == "model_call")


PROVENANCE: list[tuple[Forgery, str]] = [
    (configuration_changed, "leaders"),
    (configuration_told_otherwise, "leaders"),
    (reference_exchanged, "leaders"),
    (device_changed, "leaders"),
    (cell_changed, "figures"),
    (cell_forgotten, "figures"),
    (library_changed, "leaders"),
    (cpu_changed, "leaders"),
    (generation_falls, "leaders"),
    (layout_changed, "leaders"),
    (beginning_trained, "leaders"),
    (parent_in_another_policy, "weights"),
    (called_a_branch, "versions"),
    (selected_where_nobody_selects, "weights"),
    (address_changed, "leaders"),
    (size_changed, "leaders"),
    (sent_bytes_lie, "weights"),
    (part_of_a_step_counted, "figures"),
    (fewer_steps_than_none_skipped, "figures"),
    (time_below_zero, "figures"),
    (decision_of_another, "settings"),
    (decision_for_another_reason, "settings"),
    (decision_at_another_time, "settings"),
    (decision_named_anew, "settings"),
    (decision_for_every_policy, "settings"),
    (decision_under_another_key, "settings"),
    (eta_of_the_beginning_lies, "weights"),
    (grants_headers_changed, "folds"),
    (task_exchanged, "agreements"),
    (sources_of_a_prompt_changed, "folds"),
    (range_before_its_topic, "turns"),
    (name_replaced_without_a_word, "envelopes"),
    (another_name_than_a_replacement, "envelopes"),
    (older_hash, "envelopes"),
]
