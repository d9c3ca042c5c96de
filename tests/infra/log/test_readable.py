"""Whatever lies in a topic, a reader gets a record within its bounds or passes it over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.errors import StorageError
from millrace.infra.log.base import Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.readable import readable
from millrace.schemas import codec
from millrace.schemas import records as schemas
from millrace.schemas.limits import beyond
from millrace.schemas.records import Grant, Progress
from tests.support.odd import records

KINDS = ("Grant", "Prompt", "Resolution", "Completion", "WeightVersion", "LedgerEntry", "Decision", "WorkerStatus")


def record(value: bytes | None) -> Record:
    return Record("n.t", 0, 7, b"k", value, {}, 0)


@given(st.data(), st.sampled_from(KINDS))
def test_a_record_is_within_its_bounds_or_passed_over(data: st.DataObject, name: str) -> None:
    drawn: Any = data.draw(records(name))
    found = readable(getattr(schemas, name), record(codec.encode(name, drawn)))
    assert (found is None) == (beyond(name, drawn) is not None)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_record_are_passed_over(value: bytes) -> None:
    assert readable(Grant, record(value)) is None
    assert readable(Grant, record(codec.MARK + value)) is None


def test_what_is_passed_over_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert readable(Grant, record(None)) is None
    assert "n.t[0]@7 is passed over: it is no Grant (CorruptRecord)" in caplog.text


def test_records_behind_claims_are_read_and_lost_ones_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, progress = ClaimStore(str(tmp_path)), {"stage": "s", "slot": 0, "time": 0}
    claim = codec.encode("Claim", store.store("Progress", codec.encode("Progress", progress)))
    assert readable(Progress, record(claim), store) == progress
    assert readable(Progress, record(claim)) is None

    def away(*_: object) -> bytes:
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(store._fs, "cat_file", away)
        with pytest.raises(StorageError):
            readable(Progress, record(claim), store)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.unlink()
    assert readable(Progress, record(claim), store) is None
