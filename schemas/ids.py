"""Identities and times: uuid7 strings, which sort by creation, and microseconds since the epoch."""

from __future__ import annotations

import time

import uuid_utils

Micros = int


def new_id() -> str:
    """A fresh uuid7 as text; later ids sort after earlier ones of the same process."""
    return str(uuid_utils.uuid7())


def now_micros() -> Micros:
    """The wall clock in microseconds since the epoch."""
    return time.time_ns() // 1000
