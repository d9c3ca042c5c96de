"""The bus that the settings name."""

from __future__ import annotations

from millrace.infra.config import Settings
from millrace.infra.local_keys import kafka_options
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.bus import ArchivedBus
from millrace.infra.log.base import Bus
from millrace.infra.log.blobs import ClaimStore

PATIENCE_S = 5.0
"""how long a command that only looks waits for a broker"""


def connect(settings: Settings) -> Bus:
    """A Kafka bus on `[kafka] bootstrap`. Nothing is contacted yet."""
    from millrace.infra.log.kafka.bus import KafkaBus

    kafka = settings.kafka
    return KafkaBus(
        kafka.bootstrap,
        kafka_options(settings),
        session_timeout_s=kafka.session_timeout_s,
        replication=kafka.replication,
        prefix=f"{settings.namespace}.",
    )


def connect_now(settings: Settings) -> Bus:
    """As `connect`, for commands that only look: raises UnreachableError or AccessError within seconds."""
    from millrace.infra.log.kafka.entry import contact

    contact(settings.kafka.bootstrap, kafka_options(settings), PATIENCE_S)
    return connect(settings)


def history(settings: Settings) -> Bus:
    """As `connect_now`, with what is archived: what the topics have forgotten is read from there."""
    return ArchivedBus(connect_now(settings), Archive(settings.archive_root))


def claims(settings: Settings) -> ClaimStore:
    """The bytes behind claims, those that only the archive still has among them."""
    return ClaimStore(settings.claims, beside=Archive(settings.archive_root).claim_body)
