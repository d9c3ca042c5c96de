"""The key that requests to an engine bring.

Invariant: an engine that refuses the key is asked again only with another one, read anew: `millrace up` may have made
the key of a local engine after this process began."""

from __future__ import annotations

from collections.abc import Callable

UNAUTHORIZED_STATUS = 401
HEADER = "authorization"
Key = str | Callable[[], str]
"""an engine's key, or what reads it"""


class Bearer:
    """A key, or what reads it; an empty one is not brought."""

    def __init__(self, key: Key | None) -> None:
        self._read = key if callable(key) else lambda: key or ""
        self.key = self._read()

    @property
    def headers(self) -> dict[str, str]:
        """What a request brings."""
        return {HEADER: f"Bearer {self.key}"} if self.key else {}

    def renew(self, old_key: str) -> bool:
        """Whether there is another key than the one that was refused."""
        if self.key == old_key:
            self.key = self._read()
        return self.key != old_key
