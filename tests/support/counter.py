"""A tiny stage that uses every operation, to try the runner and the world with.

In: records of any kind on `in`, whose header `time` (micros, optional) is the log time. Out: for each key its own dense
numbers on `out` (as Progress: stage = key, slot = number), so that a lost or repeated record shows; every third number
also a Completion on `sums` with the places of these three; a key that was silent for ten seconds is forgotten and said
so on `sums`. `side` is read too: its records are counted under the key `side`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millrace.infra.log.base import Record
from millrace.infra.log.topics import logical_name
from millrace.infra.stages.base import TICK, Append, Clear, Emit, Later, Op, Put, Stage, View, Wake

SILENT = 10_000_000


def completion(kind: str, group: str, now: int, places: list[Any]) -> dict[str, Any]:
    """A Completion record whose trajectories are `places`."""
    head = {"kind": kind, "policy": "p", "slot": 0, "time": now, "group": group, "size": 3, "v_head": 0, "v_tail": 0}
    return head | {"samples": [0, 1, 2], "missing": [], "trajectories": places, "tokens": [], "rewards": []}


class Counter(Stage):
    """Counts records by key."""

    name = "counter"
    primary = "in"
    sides = ("side",)

    def __init__(self, pad: int = 0) -> None:
        """`pad`: bytes of a value that is kept for each key, besides its number."""
        self._pad = pad

    def time_of(self, view: View, record: Record) -> int | None:
        return int(record.headers["time"]) if "time" in record.headers else None

    def on_record(self, view: View, record: Record, now: int) -> Iterable[Op]:
        if logical_name(record.topic) == "side":
            yield Put("side", (view.get("side") or 0) + 1)
            return
        key = record.key.decode()
        number = (view.get(f"count/{key}") or 0) + 1
        yield Put(f"count/{key}", number)
        yield Append(f"kept/{key}", number)
        if self._pad:
            assert view.get(f"pad/{key}") in (None, f"{number - 1}".zfill(self._pad)), "its large value came back wrong"
            yield Put(f"pad/{key}", f"{number}".zfill(self._pad))
        yield Wake(f"kept/{key}", now + SILENT)
        yield Emit("out", key, "Progress", {"stage": key, "slot": number, "time": now}, ref="this")
        if number % 3 == 0:
            for n in range(2):
                extra = {"stage": f"extra/{key}", "slot": number * 2 + n, "time": now}
                yield Emit("out", key, "Progress", extra, ref=f"extra-{n}")
            places = [Later("this"), Later("extra-0"), Later("extra-1")]
            yield Emit("sums", key, "Completion", completion("complete", key, now, places), partition=0)

    def on_wake(self, view: View, key: str, now: int) -> Iterable[Op]:
        kept = list(view.items(key))
        yield Clear(key)
        record = completion("short", key, now, []) | {"samples": kept}
        yield Emit("sums", key, "Completion", record, partition=0)


class Clock(Stage):
    """A clock stage: passes on what comes with the slot's time, and says the time each second."""

    name = "clock"
    primary = "in"
    clock = True

    def on_record(self, view: View, record: Record, now: int) -> Iterable[Op]:
        yield Emit("out", record.key.decode(), "Progress", {"stage": "record", "slot": view.slot, "time": now})

    def on_wake(self, view: View, key: str, now: int) -> Iterable[Op]:
        assert key == TICK
        yield Emit("out", key, "Progress", {"stage": TICK, "slot": view.slot, "time": now}, partition=view.slot % 2)
