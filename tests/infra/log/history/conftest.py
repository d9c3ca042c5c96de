"""Both siblings of the bus, as for its own suite."""

from __future__ import annotations

from tests.infra.log.conftest import bus

__all__ = ["bus"]
