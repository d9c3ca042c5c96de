"""What takes the place of a name that holds a secret: the same for the same name, and nobody reads the name from it.

Names join records (a reward its episode, an episode its group), so they cannot just go. The replacement is a digest
under a key of the deployment: without the key, a telephone number cannot be found by trying all of them.

Invariants: the same tenant, name and key give the same replacement; it belongs on the same partition as the name did,
when both are groups; a replacement is never replaced again."""

from __future__ import annotations

import hmac
import re
import secrets
from functools import lru_cache
from itertools import count
from pathlib import Path

from millrace.infra import durable
from millrace.infra.log.topics import partition_of

MARK = "redacted-"
_LETTERS = bytes.maketrans(b"0123456789abcdef", b"abcdefghijklmnop")
_PLAIN_NAME = re.compile(rf"[0-9]{{1,11}}|[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}|{MARK}[a-p]{{32}}")
FILE = "names.key"


def is_plain(name: str) -> bool:
    """Whether nobody needs to look at a name: a short number, an id that a machine drew, or a replacement."""
    return _PLAIN_NAME.fullmatch(name) is not None


class Replacements:
    """Replacements under one key, for a deployment with `slots` partitions of `raw`."""

    def __init__(self, key: bytes, slots: int) -> None:
        self._key = key
        self._slots = slots
        self.of = lru_cache(maxsize=4096)(self._of)

    def _of(self, tenant: str, name: str) -> str:
        """What stands for a name of a tenant."""
        partition = partition_of(f"{tenant}/{name}", self._slots)
        for number in count():
            digest = hmac.digest(self._key, f"{number}\x1f{tenant}\x1f{name}".encode(), "sha256")
            # Letters alone: no digits that could look like a card or a number to call.
            replacement = MARK + digest.hex()[:32].encode().translate(_LETTERS).decode()
            if partition_of(f"{tenant}/{replacement}", self._slots) == partition:
                return replacement
        raise AssertionError("unreachable")


def key_in(home: Path) -> bytes:
    """The key of the deployment that lives in `home`, made by whoever asks first."""
    home.mkdir(parents=True, exist_ok=True)
    return durable.once(home / FILE, secrets.token_bytes(32))
