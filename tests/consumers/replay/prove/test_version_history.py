"""What lies in a ledger and is no entry of it proves nothing and hides nothing."""

from __future__ import annotations

from functools import cache

import pytest

from millrace.consumers.replay.prove.version_history import RecordedVersions
from millrace.infra.errors import LedgerError
from millrace.infra.log.base import Outgoing
from millrace.infra.log.history.reader import History as Reader
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.history_records import POLICY


@cache
def world() -> History:
    return History(0, versions=3)


def recorded(made: History) -> RecordedVersions:
    return RecordedVersions(Reader(made.bus, NS, POLICY))


@pytest.mark.parametrize("value", [None, b"", b"\xc3\x01torn", b"no record"])
def test_bytes_that_are_no_entry_are_passed_over(value: bytes | None) -> None:
    made = world().copy()
    made.bus.publisher().publish(Outgoing(made.topic("ledger"), b"k", value)).result()
    assert recorded(made).versions == recorded(world()).versions


def test_an_entry_that_cannot_be_read_any_more_is_a_hole_in_the_chain() -> None:
    made = world().copy()
    made.rewrite(made.rows("ledger")[1][0], b"torn")
    with pytest.raises(LedgerError, match=r"version 2 at .*ledger/0@\d+ follows version 0"):
        recorded(made)
