"""The registry of a tenant as a sealed file, and the registries of a deployment, read anew when their files change.

    nonce (12 bytes) | AES-256-GCM of {"subject": ["identifier", ...], ...} as JSON

Invariants: what is on the disk names nobody without the key; a file is the old one or the new one, whole; a file that
was moved, cut or written under another key is refused, never read as empty."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from millrace.infra import durable
from millrace.infra.config import Governance
from millrace.infra.errors import StorageError
from millrace.streams.refine.subjects.registry import Registry

KEY = "identifiers"
"""the file under `home/keys` that seals registries"""
_NONCE = 12
_PURPOSE = b"millrace identifiers 1"
log = logging.getLogger(__name__)

Subjects = dict[str, list[str]]


def key_in(home: Path) -> bytes:
    """The key of the deployment that lives in `home`, made by whoever asks first."""
    folder = home / "keys"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return durable.once(folder / KEY, secrets.token_bytes(32))


def write(path: Path, key: bytes, subjects: Mapping[str, Sequence[str]]) -> None:
    """Seal subjects and their identifiers into a file. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    nonce = secrets.token_bytes(_NONCE)
    durable.write(path, nonce + AESGCM(key).encrypt(nonce, orjson.dumps(dict(subjects)), _PURPOSE))


def read(path: Path, key: bytes) -> Subjects:
    """The subjects of a sealed file. Raises StorageError when there is none, or not under this key."""
    return _open(path, _bytes(path), key)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"the registry {path} cannot be read ({error.strerror}): `millrace registry add` makes one"
        ) from None


def _open(path: Path, data: bytes, key: bytes) -> Subjects:
    try:
        subjects: Subjects = orjson.loads(AESGCM(key).decrypt(data[:_NONCE], data[_NONCE:], _PURPOSE))
    except (InvalidTag, ValueError):
        raise StorageError(
            f"the registry {path} was sealed under another key, or damaged: put back the file keys/{KEY} under home, "
            "or make the registry anew with `millrace registry add`"
        ) from None
    return subjects


class Registries:
    """The registries that the settings name, by rule of a tenant."""

    def __init__(self, paths: Mapping[str, Path], key: bytes) -> None:
        """Raises StorageError when one of them cannot be read."""
        self._paths, self._key = dict(paths), key
        self._loaded = {name: self._load(path) for name, path in self._paths.items()}

    def of(self, rule: str) -> Registry | None:
        """The registry of a rule as its file is now; None where the rule names none. A file that cannot be read any
        more leaves the one that was read last in force, and the log says so."""
        path = self._paths.get(rule)
        if path is None:
            return None
        stamp, registry = self._loaded[rule]
        if _stamp(path) != stamp:
            try:
                self._loaded[rule] = stamp, registry = self._load(path)
            except StorageError as error:
                log.warning("%s; what was read before stays in force", error)
                self._loaded[rule] = _stamp(path), registry
        return registry

    def _load(self, path: Path) -> tuple[object, Registry]:
        stamp, data = _stamp(path), _bytes(path)
        version = hashlib.sha256(data).hexdigest()[:12]
        return stamp, Registry(_open(path, data, self._key), f"identifiers-{version}")


def _stamp(path: Path) -> object:
    try:
        about = os.stat(path)
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino


def registries_of(rules: Governance, home: Path) -> Registries | None:
    """Those of the settings; None where no tenant has one. Raises StorageError."""
    paths = {name: home / rule.identifiers for name, rule in rules.tenants.items() if rule.identifiers}
    return Registries(paths, key_in(home)) if paths else None
