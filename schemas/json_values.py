"""The type of what a JSON parser gives, for every room.

A value of unknown shape that is only looked at is an `object`; a `Json` is one that goes on as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Json]"
"""an object that is still being written, or that a parser gave"""
