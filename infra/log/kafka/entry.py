"""Getting in: clients made from the user's options, and the first word with the brokers.

Invariants: an option that the client library refuses is a ConfigError, whichever client meets it first; brokers that
answer and do not let us in (a wrong password, a certificate nobody here trusts) are an AccessError at once, never a
wait; brokers that do not answer are an UnreachableError after the time given. No message holds a secret.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from millrace.infra.errors import AccessError, ConfigError, UnreachableError

log = logging.getLogger(__name__)

OPTIONS = "[kafka.options]"
CHECKS = {
    KafkaError._AUTHENTICATION: (
        f'Check "sasl.mechanism", "sasl.username" and "sasl.password" in {OPTIONS}, and that the brokers know the user.'
    ),
    KafkaError._SSL: (
        f'Check "ssl.ca.location" in {OPTIONS}: a PEM file with the authority that signed the brokers\' certificates, '
        'which must name the hosts of "bootstrap". Brokers without TLS need another "security.protocol".'
    ),
}
"""what a broker says that does not let a client in, and what to do about it"""
FORBIDDEN = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
REPEAT_S = 60.0
"""how often a client that goes on trying says why it is not let in"""

Client = TypeVar("Client")


def create(kind: Callable[[dict[str, Any]], Client], config: dict[str, object]) -> Client:
    """A client. Raises ConfigError for an option that the library does not know or cannot use."""
    try:
        return kind(config)
    except KafkaException as error:
        text = error.args[0].str()
        raise ConfigError(f"{OPTIONS}: {text}. The names are librdkafka's; files must be readable here.") from error


class ErrorListener:
    """What a client complains about between calls: `error_cb` of every client. Keeps the newest reason."""

    def __init__(self, client_id: str = "") -> None:
        self._client = client_id or "kafka"
        self._warned = -REPEAT_S
        self.refusal: AccessError | None = None
        self.last = ""

    def __call__(self, error: KafkaError) -> None:
        text = reason(error)
        check = CHECKS.get(error.code())
        if check is None:
            log.debug("%s: %s", self._client, text)
            self.last = text if error.code() != KafkaError._ALL_BROKERS_DOWN else self.last
            return
        self.refusal = AccessError(f"the broker does not let us in: {text}. {check}")
        if time.monotonic() - self._warned >= REPEAT_S:
            self._warned = time.monotonic()
            log.warning("%s: %s", self._client, self.refusal)


def reason(error: KafkaError) -> str:
    """A client's words, without its state machine."""
    return re.sub(r"( \(after \d+ms in state \w+\)|: error:[0-9A-F]{8}:SSL routines:)+", "", str(error.str()))


def greet(client: Any, monitor: ErrorListener, bootstrap: str, timeout_s: float) -> Any:
    """The cluster's metadata as soon as it answers an administration client whose complaints `monitor` hears.

    Raises AccessError, or UnreachableError after `timeout_s`."""
    deadline, patience = time.monotonic() + timeout_s, 1.0
    while True:
        try:
            return client.list_topics(timeout=max(0.1, min(patience, deadline - time.monotonic())))
        except KafkaException as error:
            text = error.args[0].str()
        client.poll(0.1)
        if monitor.refusal is not None:
            raise monitor.refusal
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"no broker answers at {bootstrap} in {timeout_s:g} s ({monitor.last or text}): `millrace up` starts a "
                f"local one; else check [kafka] bootstrap and options (brokers that require TLS or a login "
                f'drop plain connections: set "security.protocol")'
            )
        patience *= 2


def contact(bootstrap: str, options: Mapping[str, object], timeout_s: float) -> tuple[Any, Any]:
    """An administration client of its own and the metadata that it was given first. Raises as `create` and `greet`."""
    from confluent_kafka.admin import AdminClient

    monitor = ErrorListener()
    client = create(AdminClient, {**options, "bootstrap.servers": bootstrap, "log_level": 0, "error_cb": monitor})
    return client, greet(client, monitor, bootstrap, timeout_s)
