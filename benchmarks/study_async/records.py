"""What dispatch reads, as (topic, schema, record): written by the simulation and by the measure of dispatch's rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from millrace.streams.dispatch.stage import Dispatch, Terms
from tests.support import versions

POLICY = "p"
START = 1_700_000_000_000_000
"""micros of log time at which everything begins"""
Turn = tuple[str, str, dict[str, Any]]


def dispatcher(release: str = "reserve") -> Dispatch:
    """The production stage of one slot. No ticket expires, however long a simulated reply takes."""
    return Dispatch(POLICY, 1, Terms(release=release, lease=10**15))


def version_zero(batch: int, eta: int, group_size: int) -> Turn:
    """What a policy begins with."""
    terms = {"batch": batch, "eta": eta, "shards": 1, "group_size": group_size}
    return f"{POLICY}.weights", "WeightVersion", versions.weights(0, "") | terms


def prompt(number: int) -> Turn:
    """A task in line."""
    record = {"id": f"t{number}", "policy": POLICY, "number": number, "task": "{}", "group_size": None, "awaits": []}
    return f"{POLICY}.prompts", "Prompt", record


def completion(ticket: int | None, tokens: Sequence[int], head: int, tail: int, seconds: float) -> Turn:
    """A ticket's group is complete, `tokens` of each sample, the oldest and the newest of versions head and tail;
    without a ticket, that time has passed."""
    size = len(tokens)
    places = [{"topic": f"{POLICY}.trajectories", "partition": 0, "offset": n} for n in range(size)]
    record: dict[str, Any] = {"kind": "progress" if ticket is None else "complete", "policy": POLICY, "slot": 0}
    record |= {"group": "" if ticket is None else f"g{ticket}", "ticket": ticket, "size": size, "missing": []}
    record |= {"samples": list(range(size)), "trajectories": places, "tokens": list(tokens), "reason": None}
    record |= {"rewards": [math.nan] * size, "v_head": head, "v_tail": tail, "time": START + round(seconds * 1e6)}
    return f"{POLICY}.completions", "Completion", record


def commit(version: int, seq_hi: int) -> Turn:
    """A version is committed."""
    return f"{POLICY}.ledger", "LedgerEntry", versions.entry(version, 0, seq_hi, b"")
