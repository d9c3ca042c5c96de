"""Dispatch at a desk: the production stage in the production fold, without a log around it.

Invariant: what is granted and in which order groups are ready is decided by `Dispatch` alone, from encoded records as
it reads them in production; this file writes those records and hands on what comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.infra.log.base import Record
from millrace.infra.stages.base import Emit
from millrace.infra.stages.fold import Fold
from millrace.infra.stages.state import SlotState
from millrace.schemas import codec
from millrace.streams.dispatch.stage import Dispatch, Terms

START = 1_700_000_000_000_000
"""micros of log time at which every simulation begins"""
LEASE = 10**15
"""micros: no ticket expires, however long a simulated reply takes"""
POLICY = "p"


def version_zero(batch: int, eta: int, group_size: int) -> dict[str, Any]:
    """The event that a policy begins with."""
    text = dict.fromkeys(("uri", "digest", "tokenizer_hash", "template_hash"), "")
    event: dict[str, Any] = {"policy": POLICY, "version": 0, "parent": None, "mode": "full", "files": {}, **text}
    event |= {"seq_lo": 0, "seq_hi": 0, "time": 0, "batch": batch, "eta": eta, "shards": 1, "group_size": group_size}
    return event


def prompt(number: int) -> dict[str, Any]:
    """A task in line."""
    return {"id": f"t{number}", "policy": POLICY, "number": number, "task": "{}", "group_size": None, "awaits": []}


def completion(ticket: int | None, tokens: Sequence[int], head: int, tail: int, time: int) -> dict[str, Any]:
    """A ticket's group is complete, `tokens` of each sample; without a ticket, that time has passed."""
    size = len(tokens)
    record: dict[str, Any] = {"kind": "progress" if ticket is None else "complete", "policy": POLICY, "slot": 0}
    record |= {"time": time, "group": "" if ticket is None else f"g{ticket}", "ticket": ticket, "size": size}
    places = [{"topic": f"{POLICY}.trajectories", "partition": 0, "offset": n} for n in range(size)]
    record |= {"samples": list(range(size)), "missing": [], "trajectories": places, "tokens": list(tokens)}
    return record | {"rewards": [math.nan] * size, "v_head": head, "v_tail": tail, "reason": None}


def ledger_entry(version: int, seq_hi: int) -> dict[str, Any]:
    """A version is committed."""
    text = dict.fromkeys(("layout", "leader", "digest", "cpu", "config_hash", "code_hash"), "")
    entry: dict[str, Any] = {"policy": POLICY, "version": version, "seq_lo": 0, "seq_hi": seq_hi, "groups": [], **text}
    entry |= {"ranks": [], "generation": 1, "unchanged": None, "masked_tokens": 0, "libraries": {}, "metrics": {}}
    return entry | {"eta": 0, "prev_hash": b"", "hash": b"", "time": 0}


class Desk:
    """The dispatcher of one policy, from version 0 on. Each call gives what it emitted, in order."""

    def __init__(self, batch: int, eta: int, group_size: int, release: str, prompts: int) -> None:
        stage = Dispatch(POLICY, 1, Terms(release=release, lease=LEASE))
        self._primary = stage.primary
        self._state = SlotState(0)
        self._fold = Fold(stage, self._state, skip_duplicates=False, isolate=False)
        self._offset = 0
        self._turn(f"{POLICY}.weights", "WeightVersion", version_zero(batch, eta, group_size))
        for number in range(prompts):
            self._turn(f"{POLICY}.prompts", "Prompt", prompt(number))

    def pass_time(self, seconds: float) -> list[Emit]:
        """Log time is known: the first grants."""
        return self._turn(self._primary, "Completion", completion(None, [], -1, -1, _micros(seconds)))

    def complete(self, ticket: int, tokens: Sequence[int], head: int, tail: int, seconds: float) -> list[Emit]:
        """A group is complete; versions of its oldest and its newest token."""
        return self._turn(self._primary, "Completion", completion(ticket, tokens, head, tail, _micros(seconds)))

    def commit(self, version: int, seq_hi: int) -> list[Emit]:
        """A version was committed."""
        return self._turn(f"{POLICY}.ledger", "LedgerEntry", ledger_entry(version, seq_hi))

    def _turn(self, topic: str, name: str, fields: Mapping[str, Any]) -> list[Emit]:
        self._offset += 1
        record = Record(f"w.{topic}", 0, self._offset, b"k", codec.encode_by_name(name, fields), {}, 0)
        emits = [emit for _, emit in self._fold.turn([record], None).emits]
        for _ in self._state.changes():
            """Reading them to the end closes the turn."""
        return emits


def _micros(seconds: float) -> int:
    return START + round(seconds * 1e6)
