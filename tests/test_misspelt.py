"""A misspelt key is an error of `make check`: keys are planted wrong in copies of the modules, and mypy names each."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / ".venv" / "package" / "millrace"

MISSPELT = [
    ("streams/seal/stage.py", 'attempt["closed"] is not None', 'attempt["colsed"] is not None', "colsed"),
    ("streams/seal/stage.py", 'None if body["whole"]', 'None if body["hwole"]', "hwole"),
    ("streams/seal/stage.py", '"winners": good', '"winenrs": good', "winenrs"),
    ("streams/seal/stage.py", '"v_tail": -1', '"v_tial": -1', "v_tial"),
    ("streams/seal/group_outcome.py", '"sealed_at": now', '"seald_at": now', "seald_at"),
    ("streams/seal/group_outcome.py", 'call["place"]', 'call["palce"]', "palce"),
    ("streams/seal/attempts.py", '"keep": body', '"kep": body', "kep"),
    ("streams/seal/attempts.py", 'body["task_id"]', 'body["taskid"]', "taskid"),
    ("streams/seal/rewards.py", 'body["supersedes"] is not None', 'body["supercedes"] is not None', "supercedes"),
    ("streams/dispatch/stage.py", '< ticket["min_version"]', '< ticket["min_verison"]', "min_verison"),
    ("streams/dispatch/stage.py", '"done": {**completion}', '"doen": {**completion}', "doen"),
    ("streams/dispatch/stage.py", "replace(book, prompt=", "replace(book, promt=", "promt"),
    ("streams/dispatch/records.py", '"lease_until": ticket', '"laese_until": ticket', "laese_until"),
    ("streams/refine/stage.py", '"source_hash": event', '"source_hahs": event', "source_hahs"),
    ("streams/refine/custody.py", '"withheld": []', '"witheld": []', "witheld"),
    ("streams/reward/judge.py", '"confidence": verdict', '"confidnece": verdict', "confidnece"),
    ("schemas/envelope.py", '"root_trajectory": belonging', '"root_trajectroy": belonging', "root_trajectroy"),
    ("producers/gateway/calls/call.py", '"prefix_len": trace', '"prefxi_len": trace', "prefxi_len"),
    ("infra/stages/slot.py", '"duplicates": fold', '"duplicate": fold', "duplicate"),
    ("infra/stages/state.py", 'change["wake"] is not None', 'change["waek"] is not None', "waek"),
    (
        "producers/gateway/sessions/sessions.py",
        '"reward_deadline_ms": reward',
        '"reward_deadlin_ms": reward',
        "reward_deadlin_ms",
    ),
    ("producers/gateway/sessions/sessions.py", 'event["trajectory"]', 'event["trajectroy"]', "trajectroy"),
    ("producers/gateway/sessions/session.py", 'event["capture_time"]', 'event["capture_tiem"]', "capture_tiem"),
    ("producers/gateway/episodes/service.py", 'session.start["sample"]', 'session.start["smaple"]', "smaple"),
    (
        "producers/gateway/episodes/service.py",
        '"rubric_version": reward_in',
        '"rubric_verison": reward_in',
        "rubric_verison",
    ),
    (
        "producers/gateway/calls/call.py",
        '"untrainable_reason": bar',
        '"untrainable_raeson": bar',
        "untrainable_raeson",
    ),
    ("producers/gateway/sessions/lineage.py", 'call["prefix_len"]', 'call["prefix_lne"]', "prefix_lne"),
    ("producers/gateway/calls/gateway.py", '"whole": session.is_whole', '"hwole": session.is_whole', "hwole"),
    ("producers/rollout/worker.py", 'resolution["solicited"]', 'resolution["solicted"]', "solicted"),
    ("infra/log/history/ledger.py", '"prev_hash": previous', '"prev_hahs": previous', "prev_hahs"),
    ("infra/log/history/newest.py", 'entry["version"] != version', 'entry["verison"] != version', "verison"),
    ("consumers/tell/subject.py", 'row["prompt_id"] == id', 'row["promptid"] == id', '"__getitem__"'),
    ("consumers/tell/story.py", 'row["source_place"] is not', 'row["source_palce"] is not', '"__getitem__"'),
    ("consumers/tell/events.py", "call['finish_reason']", "call['finish_raeson']", "finish_raeson"),
    ("consumers/tell/story.py", "sample['reward']", "sample['rewrad']", '"__getitem__"'),
    ("consumers/tell/summary.py", 'entry["masked_tokens"]', 'entry["masked_tokns"]', "masked_tokns"),
    ("consumers/tell/faults.py", 'after["generation"]', 'after["genertion"]', "genertion"),
    ("consumers/tell/status.py", 'resolution["seq"] + 1', 'resolution["sqe"] + 1', "sqe"),
    ("consumers/tell/status.py", 'one["expires_at"] <= now', 'one["expires_ta"] <= now', "expires_ta"),
    ("consumers/learner/version/order.py", 'resolution["ticket"] or 0', 'resolution["tikcet"] or 0', "tikcet"),
    ("consumers/learner/version/log.py", 'event["digest"]', 'event["digset"]', "digset"),
    ("consumers/learner/version/collect.py", 'row["role"] == "engine"', 'row["rloe"] == "engine"', '"__getitem__"'),
    ("consumers/audit/laws/episodes.py", 'row["log_time"] or 0', 'row["log_tiem"] or 0', '"__getitem__"'),
    ("consumers/audit/laws/episodes.py", 'call["root_trajectory"]', 'call["root_trajectroy"]', '"__getitem__"'),
    (
        "consumers/audit/laws/agreements.py",
        'row["v_head"], row["v_tail"]]',
        'row["v_head"], row["v_tial"]]',
        '"__getitem__"',
    ),
    ("consumers/audit/laws/events.py", 'row["governance"]', 'row["governacne"]', '"__getitem__"'),
    ("consumers/audit/laws/ledger.py", '"eta": entry["eta"]', '"eta": entry["eat"]', "eat"),
    (
        "consumers/audit/laws/tickets.py",
        'row["prompt_id"], row["group_size"]',
        'row["prompt_id"], row["grup_size"]',
        '"__getitem__"',
    ),
    ("consumers/audit/laws/ledger.py", 'row["masked_tokens"]', 'row["msaked_tokens"]', '"__getitem__"'),
    ("consumers/audit/laws/records.py", '{len(row["tokens"])', '{len(row["tokesn"])', '"__getitem__"'),
    ("consumers/audit/laws/samples.py", 'event["governance"]', 'event["governacne"]', '"__getitem__"'),
    (
        "consumers/audit/laws/versions.py",
        'row["seq_lo"], row["seq_hi"], row["policy"]',
        'row["seq_lo"], row["seq_hi"], row["polciy"]',
        '"__getitem__"',
    ),
    ("consumers/audit/laws/weights.py", 'event["template_hash"]', 'event["tempalte_hash"]', "tempalte_hash"),
    ("streams/dispatch/stage.py", '{"ticket": str', '{"tikcet": str', "tikcet"),
    ("producers/rollout/episodes.py", 'deadline=grant["deadline"]', 'dedline=grant["deadline"]', "dedline"),
    ("producers/rollout/episodes.py", 'stop_condition="timeout"', 'stop_conditon="timeout"', "stop_conditon"),
    ("producers/intake/mcp.py", "latency_us=min", "latency_ms=min", "latency_ms"),
    ("producers/intake/a2a.py", "call_id=delegation", "callid=delegation", "callid"),
    ("producers/tools.py", "latency_us=", "latency_ms=", "latency_ms"),
    ("infra/stages/decisions.py", 'decision["reason"]', 'decision["raeson"]', "raeson"),
]
"""module, text, the same misspelt, and what the error must name"""

MISPLACED = [
    ("streams/seal/stage.py", "yield GROUPS.put(key, group)", "yield ATTEMPTS.put(key, group)", 'Argument 1 to "put"'),
    ("streams/seal/stage.py", "yield TOMBSTONES.put(tombstone, True)", 'yield TOMBSTONES.put(tombstone, "")', "bool"),
    ("streams/dispatch/stage.py", "view.get(ASK)", 'view.get("asked")', 'Argument 1 to "get"'),
    ("streams/refine/stage.py", "prev = view.get(CHAIN) or START", "prev = view.get(_key(event)) or START", "bytes"),
]
"""what belongs under one key, under another or under a key without a type"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_type_checker_names_every_misspelt_key(tmp_path: Path) -> None:
    planted: dict[str, str] = {}
    for module, text, wrong, _ in MISSPELT + MISPLACED:
        source = planted.get(module, (ROOT / module).read_text())
        assert text in source, f"{module} no longer holds {text!r}: plant another mistake"
        planted[module] = source.replace(text, wrong, 1)
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--hide-error-context", "--no-pretty"]
    cache = tmp_path / "cache"
    if (ROOT / ".mypy_cache").exists():  # `make check` has left it: only what is planted is checked anew
        shutil.copytree(ROOT / ".mypy_cache", cache)
    for at, (module, source) in enumerate(planted.items()):
        # Of a file of the same size, mypy would take what it knows of the original.
        (tmp_path / f"{at}.py").write_text(f"{source}\n# planted\n")
        options += ["--shadow-file", str(PACKAGE / module), str(tmp_path / f"{at}.py")]
        options += ["-m", "millrace." + module.removesuffix(".py").replace("/", ".")]
    said, failed, _ = api.run([*options, "--cache-dir", str(cache)])
    assert not failed, failed
    errors = [line for line in said.splitlines() if ": error: " in line]
    missed = [
        (module, wrong)
        for module, _, wrong, named in MISSPELT + MISPLACED
        if not any(f"millrace/{module}:" in line and named in line for line in errors)
    ]
    assert not missed, "\n".join([*map(str, missed), *errors])


def test_stages_change_their_state_through_tables_alone() -> None:
    """A bare `Put` takes any value under any key; a table's takes what belongs there."""
    bare = re.compile(r"\b(Put|Append)\(")
    found = [str(path) for path in (ROOT / "streams").rglob("*.py") if bare.search(path.read_text())]
    assert found == []
