"""The bus that the settings name."""

from __future__ import annotations

from infra.bus.base import Bus
from infra.config import Settings


def connect(settings: Settings) -> Bus:
    """A Kafka bus on `[kafka] bootstrap`. Nothing is contacted yet."""
    from infra.bus.kafka import KafkaBus

    kafka = settings.kafka
    return KafkaBus(
        kafka.bootstrap,
        kafka.client_options(),
        session_timeout_s=kafka.session_timeout_s,
        replication=kafka.replication,
        prefix=f"{settings.namespace}.",
    )
