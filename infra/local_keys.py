"""Keys of what runs on this machine alone, so that no other user of it gets in: `home` and, in `home/keys`, the words
that the local engine, the local broker and the warehouse ask for, and the one by which a gateway knows the
rollout workers from everybody else where `[rollout] key` names none.

Invariants: `home` is open to its owner alone, and so is what roles write there; a key is made once, at random, and
appears whole; what the settings say wins over what was made here; who cannot read a key goes without, and is refused by
what asks for it."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from millrace.infra import durable
from millrace.infra.config import Settings
from millrace.infra.errors import ServiceError

ENGINE, BROKER, WAREHOUSE, WORKERS = "engine", "broker", "warehouse", "workers"
PEPPER = "pepper"
USER = "millrace"
"""whom the local broker knows"""
UMASK = 0o077


def make_home(home: Path) -> None:
    """Make `home`, or close one that is there, to all but its owner, and all that this process writes from now on.

    Raises ServiceError where it cannot be made or is another user's."""
    os.umask(UMASK)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if home.stat().st_mode & UMASK:
            home.chmod(0o700)
    except OSError as error:
        raise ServiceError(f"{home} cannot be used ({error.strerror}): choose another home") from None


def make_keys(settings: Settings, *names: str) -> None:
    """Make the keys, or those of these names, of what is local and has none. Several may do so at once."""
    make_home(settings.home)
    has_no_key = not settings.rollout.key
    local = {ENGINE: settings.engine.local, BROKER: settings.kafka.local, WAREHOUSE: True, WORKERS: has_no_key}
    for name in names or local:
        if local[name]:
            _make(settings.home / "keys" / name)


def engine_key(settings: Settings) -> str:
    """What the engine asks for; empty where it asks for nothing."""
    return settings.engine.key.get_secret_value() or (
        _read(settings.home / "keys" / ENGINE) if settings.engine.local else ""
    )


def workers_key(settings: Settings) -> str:
    """What takes grants and speaks for verifiers at the gateway: the key that `[rollout] key` names; where it names
    none, the one that was made here, empty where nobody made it yet."""
    return settings.rollout_key if settings.rollout.key else _read(settings.home / "keys" / WORKERS)


def pepper_of(settings: Settings) -> str:
    """What keys of clients are hashed with; empty where nobody made it yet, or copied it here."""
    return settings.gateway.pepper.get_secret_value() or _read(settings.home / "keys" / PEPPER)


def make_pepper(settings: Settings) -> str:
    """The pepper, made where there is none. Several may do so at once."""
    if not settings.gateway.pepper.get_secret_value():
        make_home(settings.home)
        _make(settings.home / "keys" / PEPPER)
    return pepper_of(settings)


def warehouse_key(settings: Settings) -> str:
    """What the warehouse's endpoint asks for; empty where nobody made it yet."""
    return _read(settings.home / "keys" / WAREHOUSE)


def broker_key(settings: Settings) -> str:
    """The password of the local broker; empty where there is none, or the settings say how to log in."""
    kafka = settings.kafka
    if any(name.startswith(("security.", "sasl.")) for name in kafka.options):
        return ""
    if kafka.key_file:
        return _read(Path(kafka.key_file))
    return _read(settings.home / "keys" / BROKER) if kafka.local else ""


def kafka_options(settings: Settings) -> dict[str, Any]:
    """librdkafka's options of every client, the login at the local broker included."""
    return settings.kafka.client_options() | login(broker_key(settings))


def login(password: str) -> dict[str, str]:
    """librdkafka's options for a local broker with this password; none without one."""
    if not password:
        return {}
    words = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
    return {**words, "sasl.username": USER, "sasl.password": password}


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    durable.once(path, secrets.token_hex(32).encode())


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
