"""Millrace trains LLM agents from the stream of their own experience.

The public face: what an agent's own code needs. Everything else is reached by the module that defines it, and may move
between releases.

Invariant: importing this package loads nothing else, since every process of a deployment does so; the names below are
loaded when they are first asked for. A test pins them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.infra import errors
    from millrace.producers.client import AsyncSession, Session
    from millrace.producers.tools import tool

__all__ = ["AsyncSession", "Session", "errors", "tool"]

_HOMES = {
    "AsyncSession": "millrace.producers.client",
    "Session": "millrace.producers.client",
    "tool": "millrace.producers.tools",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("millrace.infra.errors")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"millrace has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
