"""Bare weight events and ledger entries, chained but trained by nobody."""

from __future__ import annotations

from typing import Any

from millrace.infra.log.history.ledger import chain_entry


def entry(version: int, lo: int, hi: int, previous: bytes, **over: Any) -> Any:
    row: Any = {
        "policy": "p",
        "version": version,
        "seq_lo": lo,
        "seq_hi": hi,
        "groups": [],
        "ranks": [],
        "layout": "torch:d1",
        "generation": 1,
        "leader": "m",
        "unchanged": None,
        "masked_tokens": 0,
        "digest": f"digest-{version}",
        "libraries": {"torch": "2", "numpy": "1"},
        "cpu": "",
        "config_hash": "",
        "code_hash": "",
        "metrics": {"b": 1.0, "a": 2.0},
        "eta": 1,
        "prev_hash": b"",
        "hash": b"",
        "time": 5,
        "kernels": {},
        **over,
    }
    return chain_entry(row, previous)


def weights(version: int, digest: str) -> Any:
    return {
        "policy": "p",
        "version": version,
        "parent": None,
        "mode": "full",
        "uri": "",
        "digest": digest,
        "files": {},
        "tokenizer_hash": "",
        "template_hash": "",
        "seq_lo": 0,
        "seq_hi": 0,
        "batch": None,
        "eta": None,
        "shards": None,
        "group_size": None,
        "time": 0,
    }
