"""What every stage needs to read and to answer: decoded records, places, deterministic ids, dead letters.

Invariant: nothing here knows a clock or draws a random number, so a turn that is folded again makes the same records,
ids included."""

from __future__ import annotations

from typing import cast

from millrace.infra.errors import ClaimError, StorageError
from millrace.infra.log.base import Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.stages.letters import DEAD_LETTERS, SPACE, dead_letter, made_id, place_of
from millrace.schemas import codec
from millrace.schemas.errors import CorruptRecord, UnknownSchema
from millrace.schemas.records import Claim, Place

__all__ = ["DEAD_LETTERS", "SPACE", "Decoder", "Place", "Unreadable", "dead_letter", "made_id", "place_of"]


class Unreadable(Exception):
    """A record that a stage cannot read: a code and words without content. Never leaves its stage."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Decoder:
    """Decodes records, behind claims too, and remembers the last: a stage is asked for a record's time, then given it.

    Claims are named by the hash of their bytes, so looking behind one keeps a fold repeatable."""

    __slots__ = ("_claims", "_last", "_max_bytes", "_record")

    def __init__(self, claims: ClaimStore | None = None, max_bytes: int = 1 << 30) -> None:
        self._claims = claims
        self._max_bytes = max_bytes
        self._record: Record | None = None
        self._last: tuple[str, dict[str, object]] = ("", {})

    def __call__(self, record: Record) -> tuple[str, dict[str, object]]:
        """(record name, record). Raises Unreadable, and StorageError when the claim's storage does not answer."""
        if record is not self._record:
            self._last = self._decode(record.value)
            self._record = record
        return self._last

    def _decode(self, data: bytes | None) -> tuple[str, dict[str, object]]:
        if data is None:
            raise Unreadable("empty", "the record has no value")
        if len(data) > self._max_bytes:
            raise Unreadable("oversize", f"{len(data)} bytes, at most {self._max_bytes} are taken")
        try:
            name, content = codec.decode(data)
            if name != "Claim":
                return name, content
            claim = cast(Claim, content)
            if claim["size"] > self._max_bytes:
                raise Unreadable("oversize", f"{claim['size']} bytes, at most {self._max_bytes} are taken")
            if self._claims is None:
                raise Unreadable("claim_lost", "no claims directory is set")
            return codec.decode(self._claims.load(claim))
        except UnknownSchema:
            raise Unreadable("unknown_schema", "no schema of this release has the record's fingerprint") from None
        except CorruptRecord:
            raise Unreadable("undecodable", "the bytes are no record of ours") from None
        except StorageError:
            raise  # nobody can tell what the record holds: the turn is folded again once the storage answers
        except ClaimError:
            raise Unreadable("claim_lost", "the bytes behind the record's claim are missing or changed") from None
