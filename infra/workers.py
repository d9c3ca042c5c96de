"""The record by which a process says in `workers` how it is.

Invariants: one key an incarnation, so that the newest record of a key is what holds; it lapses unless it is renewed
before `expires_at`.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from millrace.infra.log.base import Outgoing
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from millrace.schemas.labels import make_label
from millrace.schemas.records import WorkerState, WorkerStatus

if TYPE_CHECKING:
    from millrace.infra.engines.control import EngineLoad

ENGINE = "engine"
DRAIN = "drain"
"""the role of a record by which somebody asks an engine to take no new calls, or to take them again; it speaks of no
process of its own"""
DRAIN_LIVES_S = 30 * 86_400.0
FORGOTTEN_US = 3_600_000_000
"""after which nobody counts with an engine of which nothing was heard: its machine may be another's"""


def key_of(worker: str, incarnation: str) -> bytes:
    """The key of what one start of a worker says."""
    return f"{worker}/{incarnation}".encode()


def drain_request(topic: str, engine: WorkerStatus, *, draining: bool = True) -> Outgoing:
    """Asks an engine, by its newest status, to take no new calls, or (`draining` False) to take them again, as its next
    start does by itself."""
    return status(
        topic,
        worker=engine["worker"],
        incarnation=engine["incarnation"],
        role=DRAIN,
        state="stopped",
        policy=engine["policy"] or "",
        lives_s=DRAIN_LIVES_S,
        url=engine["url"],
        draining=draining,
    )


def status(
    topic: str,
    *,
    worker: str,
    incarnation: str,
    role: str,
    state: WorkerState,
    policy: str,
    lives_s: float,
    version: int | None = None,
    adapter: bool = False,
    url: str | None = None,
    error: str | None = None,
    kind: str | None = None,
    load: EngineLoad | None = None,
    draining: bool = False,
) -> Outgoing:
    """What this process says now, for `lives_s` seconds. `version`: what it has loaded, as an `adapter` or whole; of an
    engine, its `kind`, its `load` as far as it says, and whether it takes no new calls (`draining`)."""
    now = now_micros()
    label = make_label(policy, version) if version is not None else None
    record: WorkerStatus = {
        "worker": worker,
        "incarnation": incarnation,
        "role": role,
        "state": state,
        "policy": policy,
        "version": version,
        "label": label,
        "adapter": label if adapter else None,
        "url": url,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "error": error,
        "expires_at": now + int(lives_s * 1e6),
        "time": now,
        "kind": kind,
        "running": load.running if load else None,
        "waiting": load.waiting if load else None,
        "free_cache": load.free_cache if load else None,
        "tokens_s": load.tokens_s if load else None,
        "draining": draining,
    }
    key = key_of(worker, f"{incarnation}/{DRAIN}" if role == DRAIN else incarnation)
    return Outgoing(topic, key, codec.encode("WorkerStatus", record))
