"""The record by which a process says in `workers` how it is.

Invariants: one key an incarnation, so that the newest record of a key is what holds; it lapses unless it is renewed
before `expires_at`.
"""

from __future__ import annotations

import os
import socket

from millrace.infra.log.base import Outgoing
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from millrace.schemas.labels import make_label
from millrace.schemas.records import WorkerState, WorkerStatus


def key_of(worker: str, incarnation: str) -> bytes:
    """The key of what one start of a worker says."""
    return f"{worker}/{incarnation}".encode()


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
) -> Outgoing:
    """What this process says now, for `lives_s` seconds. `version`: what it has loaded, as an `adapter` or whole."""
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
    }
    return Outgoing(topic, key_of(worker, incarnation), codec.encode("WorkerStatus", record))
