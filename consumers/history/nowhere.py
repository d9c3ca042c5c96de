"""Ranges that neither a topic nor the archive has, in the one way in which every reader names them."""

from __future__ import annotations


def nowhere(topic: str, partition: int, first: int, last: int, left: str) -> str:
    """What is missing and what is left."""
    return f"{topic}[{partition}]: offsets {first} to {last} are neither in the topic nor in the archive; {left}"


def begins_at(start: int) -> str:
    """What is left of a partition that has lost its beginning."""
    return f"what is left begins at {start}"
