"""Writing to Kafka: the publisher and the transactor.

Invariants: every write is idempotent and acknowledged by all replicas; a transaction lives at most `TRANSACTION_S`, so
that a dead owner holds readers up no longer; an error whose outcome is unknown is never retried as if it had failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from millrace.infra import faults
from millrace.infra.errors import BusError, FencedError, RefusedError, UnreachableError
from millrace.infra.log.base import MemberToken, Outgoing, Place, Publisher, Receipt, Transactor
from millrace.infra.log.kafka.common import STEADY, WAIT_S, bus_error, know_topic, raise_ours, writing
from millrace.infra.log.kafka.entry import create
from millrace.infra.log.kafka.liveness import HANGS_S, REPORT_MS, ClientWatcher, Pulse
from millrace.infra.log.kafka.mend import Trail

log = logging.getLogger(__name__)

TRANSACTION_S = 10.0
END_S, END_WITHIN_S = 0.002, 5.0
"""between two questions whether a transaction is ended, which takes a broker a few milliseconds; and until it is not"""
LEAVE_S = 5.0
"""how long a publisher that is closed waits for answers that nobody waited for"""
REASON_S = 2.0
"""how long a client that is over has to say why"""
GAPLESS = {
    # Left to itself the client drops a record that timed out or was refused, and goes on with those behind it. The
    # guarantee covers refusals; records that time out are exempt from it, so that none may.
    "enable.gapless.guarantee": True,
    "message.timeout.ms": 0,
}

MOVED_ON = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
}


def _retriable(error: BaseException) -> bool:
    return isinstance(error, KafkaException) and bool(error.args[0].retriable()) and not error.args[0].fatal()


def _retrying(seconds: float) -> Retrying:
    """Calls that the client says are safe to repeat: the same transaction step, not the transaction."""
    return Retrying(
        retry=retry_if_exception(_retriable),
        stop=stop_after_delay(seconds),
        wait=wait_exponential(0.02, max=0.5),
        reraise=True,
    )


def _hand_over(
    producer: Producer, topics: set[str], out: Outgoing, on_delivery: Callable[[KafkaError | None, Message], None]
) -> None:
    """Give a record to the client, waiting while its queue is full. `topics` are topics that it has met."""
    if out.topic not in topics:
        know_topic(producer, out.topic)
        topics.add(out.topic)
    headers: list[tuple[str, str | bytes | None]] = list(out.headers.items())
    partition = -1 if out.partition is None else out.partition
    while True:
        try:
            producer.produce(out.topic, out.value, out.key, partition, on_delivery, headers=headers)
            return
        except BufferError:
            producer.poll(0.05)


def _place(message: Any) -> Place:
    return Place(message.topic(), message.partition(), message.offset())


class KafkaPublisher(Publisher):
    """A producer with a thread of its own for the delivery reports.

    One that fell silent fails what it holds; without `gapless` another takes its place."""

    def __init__(self, base: Mapping[str, object], watcher: ClientWatcher, *, gapless: bool) -> None:
        self._config = {**writing(base), "linger.ms": 1, **(GAPLESS if gapless else {})}
        self._watcher = watcher
        self._gapless = gapless
        self._failed: BusError | None = None
        self._known: set[str] = set()
        self._closed = threading.Event()
        self._over = threading.Event()
        """the client told why it writes no more"""
        self._handing = threading.Lock()
        self._begin()
        self._thread = threading.Thread(target=self._serve, name="kafka-publisher", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        self._pulse = Pulse("a publisher")
        self._pulse.busy = True
        reports = {"statistics.interval.ms": REPORT_MS, "stats_cb": self._pulse.note_report}
        self._producer = create(Producer, {**self._config, **reports})
        self._watcher.watch(self._pulse)

    def _begin_anew(self) -> None:
        """Leave a silent client behind: what it holds has an unknown outcome."""
        self._watcher.forget(self._pulse)
        with self._handing:
            if self._gapless:
                self._failed = self._failed or UnreachableError("the publisher fell silent: open another, send again")
            self._producer.purge()
            self._hear_out()
            self._known.clear()
            self._begin()

    def _serve(self) -> None:
        while not self._closed.is_set():
            if not len(self._producer):
                self._pulse.restart()  # nothing is due
            if self._pulse.lost:
                self._begin_anew()
            try:
                self._producer.poll(0.1)
            except KafkaException as error:  # fatal: nothing more is written, and every record is answered so
                log.warning("a publisher is over: %s", error.args[0].str())
                self._failed = self._failed or bus_error(error.args[0], "writing")
                self._over.set()

    def publish(self, out: Outgoing) -> Future[Place]:
        future: Future[Place] = Future()

        def on_answer(error: KafkaError | None, message: Message) -> None:
            if error is None:
                future.set_result(_place(message))
            else:
                future.set_exception(self._note_failure(bus_error(error, f"writing to {out.topic}")))

        try:
            if self._failed is not None:
                raise self._failed
            with self._handing:
                _hand_over(self._producer, self._known, out, on_answer)
        except KafkaException as error:
            # A client that is over says only that; why, whoever polls it learns.
            if error.args[0].code() == KafkaError._FATAL and self._over.wait(REASON_S) and self._failed is not None:
                future.set_exception(self._failed)
            else:
                future.set_exception(self._note_failure(bus_error(error.args[0], f"writing to {out.topic}")))
        except BusError as error:
            future.set_exception(self._note_failure(error))
        return future

    def _note_failure(self, error: BusError) -> BusError:
        """The error; the first one ends a publisher that must leave no gap."""
        if self._gapless:
            self._failed = self._failed or error
        return error

    def flush(self, timeout_s: float = WAIT_S) -> None:
        count = self._producer.flush(timeout_s)
        if count:
            raise UnreachableError(
                f"{count} records are unanswered after {timeout_s} s. Check the broker, then resend."
            )

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._watcher.forget(self._pulse)
            if not self._gapless:
                self._producer.flush(LEAVE_S)
            self._producer.purge()  # else closing waits for every record to time out
            self._hear_out()
            with suppress(KafkaException):
                self._producer.close()

    def _hear_out(self) -> None:
        """Every record's answer, that it was purged among them: a future that is never answered waits for ever."""
        until = time.monotonic() + LEAVE_S
        while len(self._producer) and time.monotonic() < until:
            # Purging breaks the guarantee, which the client says first, and once: it ends here anyway.
            with suppress(KafkaException):
                self._producer.poll(0.05)


class KafkaTransactor(Transactor):
    """One producer of one transactional id. The id is fenced when the constructor returns."""

    def __init__(
        self, base: Mapping[str, object], watcher: ClientWatcher, transactional_id: str, trail: Trail | None
    ) -> None:
        """`trail` is None where the ends of transactions cannot be asked for."""
        self._watcher = watcher
        self._pulse = watcher.watch(Pulse(f"a call of {transactional_id}", HANGS_S))
        self._id = transactional_id
        self._trail = trail
        self._failed: KafkaError | None = None
        self._known: set[str] = set()
        self._open = False
        self._dead = False
        self._closed = False
        config = {"transactional.id": transactional_id, "transaction.timeout.ms": int(TRANSACTION_S * 1000)}
        self._producer = create(Producer, {**writing(base), **STEADY, **config})
        faults.point("transactor.before_fence")
        try:
            for attempt in _retrying(WAIT_S):
                with attempt, self._pulse.calling():
                    self._producer.init_transactions(WAIT_S)
        except KafkaException as error:
            watcher.forget(self._pulse)
            self._leave()
            raise_ours(error, f"fencing {transactional_id}")
        faults.point("transactor.after_fence")

    def begin(self) -> None:
        self._failed = None
        self._await_end()
        with self._speaking("beginning a transaction"):
            self._producer.begin_transaction()
        self._open = True

    def _await_end(self) -> None:
        """Wait until the last transaction is ended wherever it wrote: the next could end it otherwise (`mend`).

        Raises UnreachableError when that takes too long: a new owner of the id mends it."""
        deadline = time.monotonic() + END_WITHIN_S
        while self._trail is not None:
            try:
                wheres = self._trail.open_wheres()
                if not wheres:
                    return
                why = f"has no end yet on {sorted(wheres)}"
            except UnreachableError as error:
                why = f"may have no end: {error}"
            if time.monotonic() > deadline:
                raise UnreachableError(f"the last transaction of {self._id} {why}. Open a new transactor.")
            time.sleep(END_S)

    def send(self, out: Outgoing, *, wants_place: bool = True) -> Receipt:
        receipt = Receipt()

        def on_answer(error: KafkaError | None, message: Message) -> None:
            self._on_answer(error, message)
            if error is None:
                receipt.fill(_place(message))

        with self._speaking(f"writing to {out.topic}"):
            _hand_over(self._producer, self._known, out, on_answer if wants_place else self._on_answer)
        return receipt

    def _on_answer(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self._failed = self._failed or error
        elif self._trail is not None:
            self._trail.wrote(message.topic(), message.partition())

    def flush(self) -> None:
        with self._speaking("flushing"):
            count = self._producer.flush(TRANSACTION_S)
        if self._failed is not None:
            failure = self._failed
            self.abort()
            raise bus_error(failure, f"writing as {self._id}")
        if count:
            raise UnreachableError(f"{count} records of {self._id} are unanswered: open a new transactor")

    def commit(self, offsets: Mapping[tuple[str, int], int], member: MemberToken | None) -> None:
        if offsets and member is None:
            raise ValueError("offsets are committed on behalf of a member: pass its token")
        with self._speaking("committing"):
            if offsets and member is not None:
                if self._trail is not None:
                    self._trail.add_group(member.group)
                positions = [TopicPartition(topic, partition, at) for (topic, partition), at in offsets.items()]
                for attempt in _retrying(TRANSACTION_S):
                    with attempt:
                        self._producer.send_offsets_to_transaction(positions, member.raw, TRANSACTION_S)
            faults.point("transactor.after_offsets")
            for attempt in _retrying(TRANSACTION_S):
                with attempt:
                    self._producer.commit_transaction(TRANSACTION_S)
        self._open = False

    def abort(self) -> None:
        if not self._open:
            return
        try:
            self._producer.abort_transaction(TRANSACTION_S)
        except KafkaException as error:
            self._dead |= error.args[0].fatal()
            raise_ours(error, f"aborting as {self._id}")
        except SystemError as error:
            raise self._binding_fault(error, "aborting") from error
        self._open = False

    @contextmanager
    def _speaking(self, act: str) -> Iterator[None]:
        try:
            with self._pulse.calling():
                yield
        except KafkaException as error:
            self._give_up(error, act)
        except SystemError as error:
            raise self._binding_fault(error, act) from error

    def _binding_fault(self, error: SystemError, act: str) -> FencedError:
        """A fatal error that arrives in mid-call is sometimes lost by the client's binding, which then says nothing."""
        self._dead = True
        return FencedError(f"{act} as {self._id}: {error}. Drop this transactor and restore from the log.")

    def _give_up(self, error: KafkaException, act: str) -> None:
        """Raise what an error means; a transaction that can be aborted is."""
        cause = error.args[0]
        text = f"{act} as {self._id}"
        self._dead |= cause.fatal()
        if cause.fatal() or not cause.txn_requires_abort():
            raise_ours(error, text)
        self._open = True
        self.abort()
        if cause.code() in MOVED_ON:
            raise RefusedError(f"{text}: {cause.str()}. The group moved on: poll again.") from error
        fault = bus_error(self._failed or cause, text)
        named_fault = (
            fault if type(fault) is not BusError else UnreachableError(f"{text}: {cause.str()}: open a new transactor")
        )
        raise named_fault from error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watcher.forget(self._pulse)
        if self._open and not self._dead:
            # Letting go: what cannot be aborted now, the next owner's fence or the timeout settles.
            with suppress(BusError):
                self.abort()
        self._leave()

    def _leave(self) -> None:
        """Free the client without its own `close`, which aborts once more and waits for that for ever: brokers that
        froze in mid-commit may never answer it."""
        if not self._dead:  # a fenced client would only repeat its error
            self._producer.purge()
        del self._producer
