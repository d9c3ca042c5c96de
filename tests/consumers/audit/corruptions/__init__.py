"""Ways to break a whole world (`tests.support.history`), each with the audit's law that must name it.

A corruption changes the logs and says which record must be among those that are named."""

from __future__ import annotations

from tests.consumers.audit.corruptions import order, samples, trail
from tests.consumers.audit.corruptions.tools import Corruption

CORRUPTIONS: list[tuple[Corruption, str]] = [*order.BROKEN, *samples.BROKEN, *trail.BROKEN]
