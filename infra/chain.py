"""The hash chains over events: one per trajectory, written by the gateway, and one per slot of `events`, by refine.

Invariants: a link covers the bytes that are stored, never the plain text behind them, so that destroying a subject's
key breaks no proof; and every part is length-prefixed, so that no two events share a preimage."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

START = b""
"""prev_hash of the first event of a chain"""


def event_hash(prev: bytes, event: Mapping[str, Any]) -> bytes:
    """The 32-byte link after `prev` of an event (fields id, kind, trajectory, step and body of a `schemas` Event).

    `prev` is the former link of the same chain, or START."""
    digest = hashlib.sha256()
    for part in (
        prev,
        event["id"].encode(),
        event["kind"].encode(),
        event["trajectory"].encode(),
        struct.pack("<q", event["step"]),
        event["body"],
    ):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest()
