"""A policy as one gateway serves it, or will: how its model reads messages, and the engines that sample it."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.dialects.rendering.base import Renderer
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.producers.gateway.prices import Prices


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """`max_model_len` is the longest sequence that its model takes, in tokens; `prices` are those of its calls."""

    policy: str
    renderer: Renderer
    fleet: Fleet
    max_model_len: int
    prices: Prices | None = None

    def __post_init__(self) -> None:
        """The renderer makes no prompt that its model does not take."""
        self.renderer.limit_to(self.max_model_len)


@dataclass(slots=True, eq=False)
class AwaitedPolicy:
    """A policy that is not served yet. `why`: what it waits for, in words for the operator; `kind` changes with it."""

    policy: str
    fleet: Fleet
    why: str = "it was not looked for yet"
    kind: str = ""
