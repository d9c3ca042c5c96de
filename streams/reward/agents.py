"""The one place that runs work which waits on others: plain async functions as faust agents, at least once.

Invariants: an event's offset is acknowledged only after what it led to is in the log; nothing here relies on faust's
tables or its exactly-once, which lose and double records. Uncommitted events may be seen: what they lead to is the
same when they are written again, and counts once.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import cast

import faust
from faust.types.auth import CredentialsT

from infra.config import Kafka
from infra.errors import ConfigError

Handle = Callable[[bytes, Mapping[str, bytes]], Awaitable[None]]
"""what to do with a record's value and headers; returns once its consequences are in the log"""


def run_agent(
    kafka: Kafka, *, group: str, topic: str, handle: Handle, concurrency: int, data: Path, close: Callable[[], None]
) -> None:
    """Feed every record of `topic` to `handle`, `concurrency` at once, until SIGTERM. `close` runs at the end."""
    brokers = ";".join(f"kafka://{address.strip()}" for address in kafka.bootstrap.split(","))
    app = faust.App(
        group,
        broker=brokers,
        broker_credentials=credentials(kafka),
        store="memory://",
        datadir=str(data),
        topic_disable_leader=True,
        topic_allow_declare=False,
        web_enabled=False,
        broker_commit_interval=0.5,
        broker_session_timeout=10.0,
        consumer_auto_offset_reset="earliest",
        processing_guarantee="at_least_once",
        autodiscover=False,
    )
    source = app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")

    async def judge(stream: faust.StreamT[bytes]) -> None:
        async for event in stream.events():
            headers = {name: value or b"" for name, value in dict(event.headers or {}).items()}
            await handle(event.value, headers)

    app.agent(source, concurrency=concurrency, name=group)(judge)
    try:
        faust.Worker(app, loglevel=logging.WARNING, override_logging=False, quiet=True).execute_from_commandline()
    finally:
        close()


def credentials(kafka: Kafka) -> CredentialsT | None:
    """librdkafka's security options as faust's. Raises ConfigError for a mechanism that faust does not speak."""
    options = kafka.client_options()
    protocol = str(options.get("security.protocol", "plaintext")).upper()
    if protocol == "PLAINTEXT":
        return None
    context: ssl.SSLContext | None = None
    if "SSL" in protocol:
        context = ssl.create_default_context(cafile=options.get("ssl.ca.location"))
        if "ssl.certificate.location" in options:
            context.load_cert_chain(options["ssl.certificate.location"], options.get("ssl.key.location"))
    if protocol == "SSL":
        return cast(CredentialsT, faust.SSLCredentials(context))
    mechanism = str(options.get("sasl.mechanism", options.get("sasl.mechanisms", "PLAIN"))).upper()
    if mechanism not in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        raise ConfigError(f"the reward role cannot use sasl.mechanism {mechanism}: use PLAIN or SCRAM-SHA-256/512")
    made = faust.SASLCredentials(
        username=options.get("sasl.username"),
        password=options.get("sasl.password"),
        mechanism=mechanism,
        ssl_context=context,
    )
    return cast(CredentialsT, made)
