"""What was checked, into `raw`.

Invariants: a group is in one transaction, so no reader ever sees a part of an episode, whoever is killed when; groups
are sources of their own, so refine skips those that it has taken before; one sender of an import is alive, another
fences it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from millrace.infra import faults
from millrace.infra.log.base import Bus, Outgoing, Transactor
from millrace.infra.log.blobs import ClaimStore

RECORDS, SIZE = 512, 4 << 20
"""records and bytes from which on a transaction is committed"""


def send(bus: Bus, owner: str, groups: Iterable[list[Outgoing]], claims: ClaimStore | None) -> None:
    """Write groups. `owner`: the transactional id. Raises FencedError when the same rows are imported elsewhere,
    BusError when the log does not answer: then importing them again goes on."""
    with bus.transactor(owner) as transactor:
        waiting: list[Outgoing] = []
        size = 0
        for group in groups:
            waiting += group
            size += sum(len(one.value or b"") for one in group)
            if len(waiting) >= RECORDS or size >= SIZE:
                _commit(transactor, waiting, claims)
                waiting, size = [], 0
        if waiting:
            _commit(transactor, waiting, claims)


def _commit(transactor: Transactor, waiting: Iterable[Outgoing], claims: ClaimStore | None) -> None:
    fitting = [_fitting(out, claims) for out in waiting]  # a storage takes its time, and a transaction has little
    transactor.begin()
    for out in fitting:
        transactor.send(out, placed=False)
        faults.point("import.sent")
    faults.point("import.written")
    transactor.commit({}, None)
    faults.point("import.committed")


def _fitting(out: Outgoing, claims: ClaimStore | None) -> Outgoing:
    return replace(out, value=claims.fitting("Event", out.value or b"")) if claims else out
