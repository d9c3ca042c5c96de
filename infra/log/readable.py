"""Records of the log for roles that are no stage: what cannot be read, or is beyond a bound, is named and passed over.

Invariant: no record raises here, whatever its bytes are; only storage that does not answer does (StorageError), since
that says nothing about the record."""

from __future__ import annotations

import logging
from typing import TypeVar, cast

from millrace.infra.errors import ClaimError, StorageError
from millrace.infra.log.base import Record
from millrace.infra.log.blobs import ClaimStore
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError
from millrace.schemas.limits import beyond

log = logging.getLogger(__name__)

T = TypeVar("T")


def readable(kind: type[T], record: Record, claims: ClaimStore | None = None) -> T | None:
    """What a record of the log holds, behind its claim where it is one; None, and a line in the log of this process,
    when that is none of this kind (a type of `schemas.records`) or is beyond a bound."""
    name = kind.__name__
    try:
        data = record.value or b""
        fields = codec.decode_by_name(name, data if claims is None else claims.behind(data))
        fault = beyond(name, fields)
    except StorageError:
        raise
    except (SchemaError, ClaimError) as error:
        fault = f"it is no {name} ({type(error).__name__})"
    if fault is None:
        return cast(T, fields)
    passed_over(record, fault)
    return None


def passed_over(record: Record, fault: str) -> None:
    """Name a record that its reader leaves out, and why, without content."""
    log.error("%s[%d]@%d is passed over: %s", record.topic, record.partition, record.offset, fault)
