"""Proof that a reward comes from who may give rewards: a keyed signature over the event's hash, in a header.

Invariants: the hash covers the whole event, so a proof fits one event alone; the key is `[reward] key`, which gateway,
reward role and refine share; without a key nothing is proven and nothing asked for, and whoever may write to `raw` may
give rewards."""

from __future__ import annotations

import hashlib
import hmac

HEADER = "proof"
_PURPOSE = b"millrace reward\0"


def proof_of(key: str, hash: bytes) -> str:
    """The proof for an event with this hash."""
    return hmac.new(key.encode(), _PURPOSE + hash, hashlib.sha256).hexdigest()


def proven(key: str, hash: bytes, proof: bytes | None) -> bool:
    """Whether `proof`, the value of the header, is the proof."""
    return proof is not None and hmac.compare_digest(proof, proof_of(key, hash).encode())
