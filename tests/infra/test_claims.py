"""Claims: stored once, checked on the way back, never outside their root."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.bus.base import Record
from infra.claims import ClaimStore
from infra.errors import ClaimError
from schemas import codec


def record(value: bytes | None) -> Record:
    return Record("t", 0, 0, b"", value, {}, 0)


@pytest.fixture(params=["", "file://", "memory://"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ClaimStore:
    return ClaimStore(f"{request.param}{tmp_path}")


def test_bytes_come_back(store: ClaimStore) -> None:
    claim = store.store("Event", b"data")
    assert (claim["size"], claim["name"]) == (4, "Event")
    assert store.load(claim) == b"data"
    assert store.store("Event", b"data") == claim
    assert store.resolve(record(codec.encode("Claim", claim))).value == b"data"


def test_other_records_resolve_to_themselves(store: ClaimStore) -> None:
    progress = record(codec.encode("Progress", {"stage": "s", "slot": 0, "time": 0}))
    assert store.resolve(progress) is progress
    assert store.resolve(record(None)).value is None


def test_stored_once(tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path))
    store.store("Event", b"data")
    store.store("Event", b"data")
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_a_torn_write_is_written_again(tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path))
    claim = store.store("Event", b"data")
    Path(claim["uri"].removeprefix("file://")).write_bytes(b"da")
    with pytest.raises(ClaimError, match="other bytes"):
        store.load(claim)
    assert store.load(store.store("Event", b"data")) == b"data"


def test_changed_missing_and_foreign_bytes_are_refused(tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path / "root"))
    claim = store.store("Event", b"data")
    path = Path(claim["uri"].removeprefix("file://"))
    path.write_bytes(b"atad")
    with pytest.raises(ClaimError, match="other bytes"):
        store.load(claim)
    path.unlink()
    with pytest.raises(ClaimError, match="cannot be read"):
        store.load(claim)
    (tmp_path / "secret").write_bytes(b"data")
    for uri in (f"file://{tmp_path}/secret", "/etc/passwd", "http://127.0.0.1/x", f"file://{tmp_path}/root/../secret"):
        with pytest.raises(ClaimError, match="not in this store"):
            store.load({**claim, "uri": uri})
    outside = f"../../{tmp_path.name}/secret"
    with pytest.raises(ClaimError, match="not in this store"):
        store.load({**claim, "sha256": outside, "uri": f"file://{tmp_path}/root/../{outside}"})
