"""Plain async functions as faust agents: the one file that knows faust.

At least once, and no more is asked of it: its exactly-once and its tables lose and double records. Measured traps that
this file keeps out:

- streams acknowledge an event that a shutdown or rebalance cancelled half way: here acknowledging is manual, after the
  answer is acknowledged by all replicas;
- without transactions its consumer reads what was aborted: here it reads committed records only;
- an exception in an agent acknowledges the event and goes on: here it ends the process, and the next one begins at the
  same event;
- its committed offset stops at every hole of the log for half a second, so it falls behind a log of transactions for
  good, and it counts the event behind a hole as acknowledged: here the mark is our own (`answered`).

Invariants: the committed offset of a partition is at most the first event whose answer is not acknowledged, and it
reaches the last event as soon as all are answered. Every event that awaits a verdict ends in a reward record, in a
failure that says `too_large`, or in the log of this process and as `missing` of its trajectory."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import traceback
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import faust
from faust.transport.drivers import aiokafka as driver
from faust.types import TP, EventT, Message
from tenacity import before_sleep_log, retry, retry_if_exception, wait_exponential

from millrace.infra.errors import BusError, ConfigError, TooLargeError
from millrace.infra.log.base import Bus, Outgoing, Publisher, Record

P = TypeVar("P", bound=Hashable)


class AnswerMarks(Generic[P]):
    """Delivered and answered offsets of several partitions."""

    def __init__(self) -> None:
        self._waiting: dict[P, set[int]] = {}
        self._next: dict[P, int] = {}

    def deliver(self, partition: P, offset: int) -> None:
        """An event is handed to who answers it. Delivering it again makes it wait again."""
        self._waiting.setdefault(partition, set()).add(offset)
        self._next[partition] = max(self._next.get(partition, 0), offset + 1)

    def answer(self, partition: P, offset: int) -> None:
        """Its answer is safe. One that was never delivered, or belongs to a partition that was let go, changes
        nothing."""
        self._waiting.get(partition, set()).discard(offset)

    def mark(self, partition: P) -> int | None:
        """The offset to commit, None where nothing was delivered."""
        waiting = self._waiting.get(partition)
        return min(waiting) if waiting else self._next.get(partition)

    def forget(self, partitions: Iterable[P]) -> None:
        """These belong to another reader now."""
        for partition in partitions:
            self._waiting.pop(partition, None)
            self._next.pop(partition, None)


log = logging.getLogger(__name__)

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
FAILURE_EXIT = 70
"""exit code of a process whose agent failed: the supervisor starts another"""


class Answering(Protocol):
    """What answers an event."""

    async def __call__(self, record: Record) -> Outgoing | None:
        """The record to publish, None when there is nothing to say."""

    def too_large(self, record: Record) -> Outgoing | None:
        """The record to publish instead of an answer that the log refuses for its size."""


class _Thread(driver.AIOKafkaConsumerThread):
    """Reads committed records only."""

    def _create_worker_consumer(self, transport: driver.Transport) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = "read_committed"
        return consumer


class _Consumer(driver.Consumer):
    """Commits what is answered. faust asks `_new_offset` what to commit, and its own records of holes stay empty."""

    def __init__(
        self, transport: Any, callback: Callable[[Message], Awaitable[None]], *others: Any, **named: Any
    ) -> None:
        self._answered: AnswerMarks[TP] = AnswerMarks()

        async def deliver(message: Message) -> None:
            # Before it is handed on: one that a rebalance stops half way waits here until it is delivered again.
            self._answered.deliver(message.tp, message.offset)
            await callback(message)

        super().__init__(transport, deliver, *others, **named)

    def ack(self, message: Message) -> bool:
        self._answered.answer(message.tp, message.offset)
        return bool(super().ack(message))

    def _new_offset(self, tp: TP) -> int | None:
        self._acked[tp].clear()
        self._acked_index[tp].clear()
        return self._answered.mark(tp)

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """Holes mean nothing here."""

    async def on_partitions_revoked(self, partitions: set[TP]) -> None:
        await super().on_partitions_revoked(partitions)
        self._answered.forget(partitions)

    def _new_consumer_thread(self) -> _Thread:
        return _Thread(self, loop=self.loop, beacon=self.beacon)


class _Transport(driver.Transport):
    Consumer = _Consumer


def make_app(
    group: str,
    topic: str,
    answer: Answering,
    bus: Bus,
    *,
    bootstrap: str,
    options: Mapping[str, Any],
    data: Path,
    concurrency: int = 4,
) -> faust.App:
    """An app of one agent that reads `topic` (full name) as a member of `group` and publishes what `answer` returns.

    `options` are librdkafka's names (security.protocol, sasl.*, ssl.*). Raises ConfigError for one that faust cannot
    honour."""
    data.mkdir(parents=True, exist_ok=True)
    app = faust.App(
        group,
        broker=[f"aiokafka://{server.strip()}" for server in bootstrap.split(",")],
        broker_credentials=credentials(options),
        broker_commit_interval=0.5,
        broker_session_timeout=10.0,
        broker_heartbeat_interval=2.0,
        broker_request_timeout=40.0,
        consumer_auto_offset_reset="earliest",
        topic_disable_leader=True,
        topic_allow_declare=False,
        store="memory://",
        web_enabled=False,
        autodiscover=False,
        datadir=str(data),
    )
    app.transport = _Transport(app.conf.broker, app, loop=app.loop)
    source = app.topic(
        topic, key_type=bytes, key_serializer="raw", value_type=bytes, value_serializer="raw", internal=False
    )
    publisher = bus.publisher()

    @app.agent(source, concurrency=concurrency, name="answer")
    async def agent(stream: Any) -> None:
        async for event in stream.noack().events():
            try:
                record = _record(event)
                out = await answer(record)
                if out is not None:
                    await _deliver(publisher, answer, record, out)
            except Exception:
                traceback.print_exc()
                os._exit(FAILURE_EXIT)
            event.ack()

    return app


async def _deliver(publisher: Publisher, answer: Answering, record: Record, out: Outgoing) -> None:
    """Publish an answer. One that the log will never take is replaced by its failure; what is refused even then is a
    line here, and its trajectory says that the reward is missing."""
    try:
        await _publish(publisher, out)
        return
    except TooLargeError as error:
        log.error("The verdict on %s is too large for the log: %s A failure replaces it.", record.place, error)
    instead = answer.too_large(record)
    try:
        if instead is not None:
            await _publish(publisher, instead)
    except TooLargeError as error:
        log.error("No reward can be written for %s: %s", record.place, error)


def _may_pass(error: BaseException) -> bool:
    """Whether another try may work."""
    return isinstance(error, BusError) and not isinstance(error, TooLargeError)


@retry(
    retry=retry_if_exception(_may_pass),
    wait=wait_exponential(multiplier=0.2, max=10),
    before_sleep=before_sleep_log(log, logging.WARNING),
)
async def _publish(publisher: Publisher, out: Outgoing) -> None:
    await asyncio.wrap_future(publisher.publish(out))


def _record(event: EventT[object]) -> Record:
    message = event.message
    headers = dict(message.headers or {})
    return Record(
        message.topic,
        message.partition,
        message.offset,
        message.key or b"",
        message.value,
        headers,
        int(message.timestamp * 1_000_000),
    )


def credentials(options: Mapping[str, Any]) -> faust.SASLCredentials | faust.SSLCredentials | None:
    """librdkafka's security options as faust's. Raises ConfigError for what faust cannot do."""
    names = {"security.protocol", "sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password"}
    names |= {"ssl.ca.location", "ssl.ca.pem", "ssl.certificate.location", "ssl.key.location", "ssl.key.password"}
    names |= {"ssl.endpoint.identification.algorithm"}
    extras = [name for name in options if name.startswith(("sasl.", "ssl.", "security.")) and name not in names]
    if extras:
        raise ConfigError(f"[kafka.options] {', '.join(extras)}: the reward role cannot honour it")
    protocol = str(options.get("security.protocol", "plaintext")).lower()
    context = _tls(options) if protocol.endswith("ssl") else None
    if protocol.startswith("sasl"):
        mechanism = options.get("sasl.mechanism") or options.get("sasl.mechanisms") or "PLAIN"
        if mechanism not in MECHANISMS:
            raise ConfigError(f"[kafka.options] sasl.mechanism {mechanism}: the reward role knows {MECHANISMS}")
        return faust.SASLCredentials(
            username=options.get("sasl.username"),
            password=options.get("sasl.password"),
            mechanism=mechanism,
            ssl_context=context,
        )
    return faust.SSLCredentials(context) if context is not None else None


def _tls(options: Mapping[str, Any]) -> ssl.SSLContext:
    authority, key = options.get("ssl.ca.location"), options.get("ssl.key.location")
    try:
        context = ssl.create_default_context(
            cafile=None if authority in ("", "probe") else authority, cadata=options.get("ssl.ca.pem")
        )
        if "ssl.certificate.location" in options:
            context.load_cert_chain(options["ssl.certificate.location"], key, options.get("ssl.key.password"))
    except OSError as error:
        raise ConfigError(f"[kafka.options] the files of TLS cannot be used: {error}") from error
    has_checks = str(options.get("enable.ssl.certificate.verification", "true")).lower() != "false"
    has_name_check = str(options.get("ssl.endpoint.identification.algorithm", "https")).lower() != "none"
    context.check_hostname = has_checks and has_name_check
    context.verify_mode = ssl.CERT_REQUIRED if has_checks else ssl.CERT_NONE
    return context


def run_app(app: faust.App) -> None:
    """Run until SIGTERM."""
    faust.Worker(
        app, loglevel="warning", override_logging=False, redirect_stdouts=False, quiet=True
    ).execute_from_commandline()
