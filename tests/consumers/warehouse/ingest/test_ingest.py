"""The log in tables: every row the record that it was made of, once, whatever lies between."""

from __future__ import annotations

import io
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastavro import schemaless_writer

from millrace.consumers.warehouse.ingest import blocks as cutting
from millrace.consumers.warehouse.ingest import ingest as under_test
from millrace.consumers.warehouse.ingest.avro_file import make_frame, with_place
from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.ingest.table_choice import kind_of
from millrace.consumers.warehouse.ingest.topic_identity import recreation_reason, tips
from millrace.consumers.warehouse.rebuild import drop, irrecoverable
from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.consumers.warehouse.store.tables import BY_NAME, LOG, TABLES, table_of
from millrace.infra.errors import ClaimError, StorageError, WarehouseError
from millrace.infra.log.base import Outgoing, Record, TopicSpec
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.kinds import HOLDS
from millrace.schemas import codec
from millrace.schemas.arrays import unpack
from millrace.schemas.registry import _past
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.warehouse import BEYOND, differing, digests, first, world


def take_in(store: Store, made: History, behind: Any = lambda data: data) -> int:
    return Ingest(made.bus, store, NS, behind).catch_up()


def records(made: History) -> list[tuple[str, Record]]:
    """Every committed record of a topic that has a table, with the topic's kind."""
    found = []
    for topic in made.bus.topics(f"{NS}."):
        kind = kind_of(topic.removeprefix(f"{NS}."))
        if kind is not None:
            found += [(kind, r) for p in range(made.bus.partitions(topic)) for r in made.bus.read(topic, p)]
    return found


def plain(value: Any) -> Any:
    """A value of a record as a table gives it."""
    match value:
        case {"dtype": str(), "data": bytes()}:
            return unpack(value).tolist()  # type: ignore[arg-type]
        case dict():
            return {key: plain(inner) for key, inner in value.items()}
        case list():
            return [plain(inner) for inner in value]
        case bytes():
            return value.decode(errors="replace")
        case _:
            return value


def told(row: Mapping[str, Any], prefix: str, name: str, value: Any, wrong: list[str]) -> None:
    """Compare the columns of one field with its value; what differs goes to `wrong`."""
    value = plain(value)
    if isinstance(value, dict) and f"{prefix}{name}" not in row:
        for key, inner in value.items():
            told(row, f"{prefix}{name}_", key, inner, wrong)
        return
    if isinstance(value, list) and f"{prefix}{name}" not in row:
        if value and isinstance(value[0], dict):
            for key in value[0]:
                same(row[f"{prefix}{name}.{key}"], [each[key] for each in value], f"{name}.{key}", wrong)
        return
    if value is None and f"{prefix}{name}" not in row:
        assert all(not found for column, found in row.items() if column.startswith(f"{prefix}{name}"))
        return
    same(row[f"{prefix}{name}"], value, f"{prefix}{name}", wrong)


def same(found: Any, value: Any, what: str, wrong: list[str]) -> None:
    if isinstance(found, datetime):
        found = round(found.replace(tzinfo=UTC).timestamp() * 1e6)
    if isinstance(found, str) and isinstance(value, str) and "�" in value:
        return  # bytes that are no text are compared by test_bytes_are_kept
    if isinstance(value, float) and value != value:
        value, found = None, None if found != found else found
    if json.dumps(found, default=str) != json.dumps(value, default=str):
        wrong.append(f"{what}: {found!r} is not {value!r}")


def test_every_row_is_its_record(store: Store) -> None:
    made = History(3, versions=3)
    take_in(store, made)
    rows: dict[tuple[str, str, int, int], dict[str, Any]] = {}
    for table in TABLES:
        with store.client(LOG) as client:
            found = client.query(f"SELECT * FROM {table.full_name}")
            for row in found.named_results():
                rows[table.name, row["topic"], row["part"], row["off"]] = row
    wrong: list[str] = []
    for kind, record in records(made):
        if record.value is None or record.value == b"not avro":
            continue
        name, fields = codec.decode(record.value)
        table = table_of(kind, name)
        assert table is not None
        row = rows.pop((table.name, record.topic, record.partition, record.offset))
        assert round(row["logged"].replace(tzinfo=UTC).timestamp() * 1e3) == record.timestamp // 1000
        for field, value in fields.items():
            if (name, field) == ("Event", "body"):
                for inner, content in codec.decode_body(fields["kind"], value).items():
                    told(row, f"{fields['kind']}_", inner, content, wrong)
            else:
                told(row, "", field, value, wrong)
    assert wrong == []
    assert rows == {}


def test_bytes_are_kept(store: Store) -> None:
    made = History(3, versions=1)
    take_in(store, made)
    for record in made.bus.read(made.topic("ledger"), 0):
        entry = codec.decode_as("LedgerEntry", record.value or b"")
        ((found,),) = store.rows(f"SELECT hex(hash) FROM ledger WHERE off = {record.offset}")
        assert found.lower() == entry["hash"].hex()


def test_what_cannot_be_read_is_named_and_stops_nothing(store: Store) -> None:
    made = world(1)
    take_in(store, made)
    found = store.rows("SELECT topic, part, off, reason FROM unreadable ORDER BY ALL")
    per = Counter(topic for topic, *_ in found)
    assert per == {made.topic(kind): 5 for kind in ("events", "trajectories", "ledger")} | {made.topic("raw"): 1}
    assert all(reason for *_, reason in found)
    for kind, table in (("events", "events"), ("trajectories", "trajectories"), ("ledger", "ledger")):
        last = max(record.offset for record in made.bus.read(made.topic(kind), 0))
        ((count,),) = store.rows(f"SELECT count() FROM {table} WHERE part = 0 AND off = {last}")
        assert count == 1, "what lies behind it came in"


def test_each_record_is_one_row_of_one_table(store: Store) -> None:
    made = world(2)
    written = take_in(store, made)
    union = " UNION ALL ".join(f"SELECT topic, part, off FROM {table.full_name}" for table in TABLES)
    rows = store.rows(f"SELECT * FROM ({union} UNION ALL SELECT topic, part, off FROM unreadable)")
    tombstones = [r for kind, r in records(made) if r.value is None and kind == "workers"]
    assert sorted(rows) == sorted((r.topic, r.partition, r.offset) for _, r in records(made) if r not in tombstones)
    assert written == len(rows) - store.rows("SELECT count() FROM unreadable")[0][0]
    assert take_in(store, made) == 0


def test_where_blocks_end_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(4, versions=1)
    take_in(store, made)
    before = digests(store)
    for span, size in ((16, 1 << 20), (1 << 20, 20_000)):
        monkeypatch.setattr(cutting, "SPAN", span)
        monkeypatch.setattr(cutting, "SIZE", size)
        drop(store, NS)
        migrate(store)
        take_in(store, made)
        assert differing(before, digests(store)) == []


def test_one_insert_is_one_part(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a block with more rows than the engine gathers by itself."""
    made = History(1, versions=1)
    (record, *_) = made.bus.read(made.topic("completions"), 0)
    value = codec.encode("Progress", {"stage": "seal", "slot": 0, "time": 0})
    rows = [row_of(record, offset, value) for offset in range(1_200_000)]
    frame = make_frame(BY_NAME["progress"], record.topic, 0, rows)
    store.insert(frame.into, frame.pieces, "one-part")
    found = store.rows(
        f"SELECT sum(rows), count() FROM system.parts WHERE database = '{LOG}' AND table = 'progress' AND level = 0"
    )
    assert found == [(1_200_000, 1)]


def row_of(record: Record, offset: int, value: bytes) -> bytes:
    """A row as the warehouse makes it."""
    return with_place(offset, record.timestamp) + value[codec.HEAD :]


def test_a_row_that_runs_into_the_next_is_refused(store: Store) -> None:
    """Bytes that hold a whole row of somebody's making behind a record come in as no row."""
    made = History(1, versions=1)
    first, second, *_ = made.bus.read(made.topic("completions"), 0)
    forged = row_of(second, 999_999, second.value or b"")
    row = row_of(first, first.offset, first.value or b"")
    frame = make_frame(BY_NAME["completions"], first.topic, 0, [row + b"12345678" + forged])
    with pytest.raises(WarehouseError):
        store.insert(frame.into, frame.pieces, "forged")
    assert store.rows("SELECT count() FROM completions") == [(0,)]


def test_claims_are_resolved_and_missing_ones_named(store: Store, tmp_path: Path) -> None:
    made = History(1, versions=1)
    claims = ClaimStore(str(tmp_path / "claims"))
    topic = made.topic("trajectories")
    sound = next(r for r in made.bus.read(topic, 0)).value or b""
    claim = claims.store("Trajectory", sound)
    publisher = made.bus.publisher()
    there = publisher.publish(Outgoing(topic, b"k", codec.encode("Claim", claim), partition=0)).result()
    gone = {**claim, "sha256": "0" * 64}
    publisher.publish(Outgoing(topic, b"k", codec.encode("Claim", gone), partition=0)).result()  # type: ignore[arg-type]
    take_in(store, made, claims.behind)
    assert store.rows(f"SELECT count() FROM trajectories WHERE part = 0 AND off = {there.offset}") == [(1,)]
    ((reason,),) = store.rows(f"SELECT reason FROM unreadable WHERE topic = '{topic}'")
    assert "claims directory" in reason


def test_storage_that_does_not_answer_loses_nothing(store: Store) -> None:
    made = History(1, versions=1)
    claim = {"uri": "x", "sha256": "0" * 64, "size": 1, "name": "Trajectory"}
    sound = next(r for r in made.bus.read(made.topic("trajectories"), 0)).value or b""
    outgoing = Outgoing(made.topic("trajectories"), b"k", codec.encode("Claim", claim), partition=0)  # type: ignore[arg-type]
    made.bus.publisher().publish(outgoing).result()

    def away(data: bytes) -> bytes:
        if codec.name_of(data) == "Claim":
            raise StorageError("not now")
        return data

    with pytest.raises(StorageError):
        take_in(store, made, away)
    take_in(store, made, lambda data: sound if codec.name_of(data) == "Claim" else data)
    count = sum(1 for kind, _ in records(made) if kind == "trajectories")
    assert store.rows("SELECT count() FROM trajectories") == [(count,)]
    assert issubclass(StorageError, ClaimError)


def test_records_of_an_older_release_come_in(store: Store) -> None:
    made = History(1, versions=1)
    old = next(schema for schema in _past().values() if schema.name == "LedgerEntry")
    record = next(r for r in made.bus.read(made.topic("ledger"), 0))
    out = io.BytesIO()
    schemaless_writer(out, old.definition, codec.decode_as("LedgerEntry", record.value or b""))
    value = codec.MARK + old.fingerprint + out.getvalue()
    at = made.bus.publisher().publish(Outgoing(record.topic, b"k", value, partition=0)).result()
    take_in(store, made)
    digest = codec.decode_as("LedgerEntry", value)["digest"]
    assert store.rows(f"SELECT digest FROM ledger WHERE off = {at.offset}") == [(digest,)]


def test_months_are_blocks_of_their_own(store: Store) -> None:
    made = History(1, versions=1)
    made.now += 40 * 24 * 3600 * 1_000_000
    made.status("engine-0", "engine", 1)
    take_in(store, made)
    months = store.rows("SELECT partition, count() FROM system.parts WHERE table = 'workers' AND active GROUP BY ALL")
    assert sorted(months) == [("202311", 1), ("202312", 1)]


@pytest.mark.parametrize("timestamp", [-1, -(1 << 62), 0, 1 << 62])
def test_a_time_that_no_table_holds_stops_nothing(store: Store, timestamp: int) -> None:
    made = History(1, versions=1)
    record = next(r for r in made.bus.read(made.topic("completions"), 0))
    odd = replace(record, timestamp=timestamp)
    frame = make_frame(BY_NAME["completions"], odd.topic, 0, [row_of(odd, 5, odd.value or b"")])
    store.insert(frame.into, frame.pieces, "odd")
    assert store.rows("SELECT off FROM completions") == [(5,)]


def test_a_topic_made_anew_is_refused(store: Store) -> None:
    made, other = History(1, versions=4), History(1, versions=1)
    take_in(store, made)
    with pytest.raises(WarehouseError, match=r"made anew.*rebuild"):
        take_in(store, other)


def test_a_topic_made_anew_that_is_longer_by_now_is_refused(store: Store) -> None:
    made = History(1, versions=2)
    take_in(store, made)
    other = History(7, versions=4)
    topics = [topic for topic in made.bus.topics(f"{NS}.") if kind_of(topic.removeprefix(f"{NS}."))]
    assert all(other.bus.ends(topic)[0] >= made.bus.ends(topic)[0] for topic in topics if topic.endswith("ledger"))
    with pytest.raises(WarehouseError, match=r"holds another record at offset \d+ .*made anew.*rebuild --forget"):
        Ingest(other.bus, store, NS, lambda data: data).catch_up()
    assert any("the former one is nowhere" in line for line in irrecoverable(other.bus, store, NS))


def test_a_topic_that_grew_or_was_compacted_is_the_same(store: Store) -> None:
    made = History(1, versions=2)
    status = first(made, "workers")
    take_in(store, made)
    workers = made.topic("workers")
    part = next(p for p in range(made.bus.partitions(workers)) if made.bus.ends(workers)[p])
    made.bus.logs[workers][part].entries[:] = [None] * made.bus.ends(workers)[part]
    made.bus.publisher().publish(Outgoing(workers, b"k", status, partition=part)).result()
    assert take_in(store, made) == 1
    assert irrecoverable(made.bus, store, NS) == []


def test_proofs_of_an_older_release_tell_nothing(store: Store) -> None:
    made, other = History(1, versions=1), History(7, versions=4)
    take_in(store, made)
    store.run(f"ALTER TABLE {LOG}.blocks UPDATE tip = '' WHERE 1 SETTINGS mutations_sync = 2")
    assert tips(store, NS) == {}
    store.run(f"DROP TABLE {LOG}.blocks")  # as a rebuild that died leaves it
    assert tips(store, NS) == {}
    where = made.topic("ledger"), 0
    assert recreation_reason(other.bus, where, 1, None) == ""
    assert recreation_reason(other.bus, where, 1 << 40, None).startswith("ends at offset")


def test_what_the_log_has_forgotten_is_not_dropped_for_a_rebuild(store: Store) -> None:
    made, later = History(1, versions=2), History(1, versions=2)
    take_in(store, made)
    assert irrecoverable(made.bus, store, NS) == []
    topic = made.topic("raw")
    later.bus.starts = lambda name: {0: 3, 1: 0} if name == topic else made.bus.starts(name)  # type: ignore[method-assign]
    (lost,) = irrecoverable(later.bus, store, NS)
    gone = "offsets 0 to 2 are neither in the topic nor in the archive"
    assert lost == f"{topic}[0]: {gone}; what is left begins at 3"


def test_kinds_of_topics() -> None:
    found = {kind_of(name) for name in ("raw", "p.ledger", "turns.refine", "turns.p.dispatch", "dead-letters")}
    assert found == {"raw", "ledger", "turns.refine", "turns.dispatch", "dead-letters"}
    assert {kind_of(name) for name in ("changelog.seal", "changelog.p.dispatch", "other", "p.other")} == {None}
    assert all(table_of(kind, name) for kind, names in HOLDS.items() for name in names)


def test_policies_come_while_it_runs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = History(1, versions=1)
    monkeypatch.setattr(under_test, "LOOK_S", 0.0)
    monkeypatch.setattr(under_test, "LINGER_S", 0.0)
    ingest, over = Ingest(made.bus, store, NS, lambda data: data), threading.Event()
    thread = threading.Thread(target=ingest.follow, args=(over,))
    thread.start()
    try:
        made.bus.ensure_topics([TopicSpec(f"{NS}.late.weights", 1)])
        value = next(r for r in made.bus.read(made.topic("weights"), 0)).value
        made.bus.publisher().publish(Outgoing(f"{NS}.late.weights", b"k", value, partition=0)).result()
        until = time.monotonic() + 60
        while store.rows(f"SELECT count() FROM weights WHERE topic = '{NS}.late.weights'") != [(1,)]:
            assert time.monotonic() < until, ingest.trouble
            time.sleep(0.05)
    finally:
        over.set()
        thread.join()
    count = sum(1 for _, r in records(made) if r.value and r.value != b"not avro")
    assert ingest.rows == count


def test_bytes_of_nobody_are_what_the_world_holds() -> None:
    assert BEYOND in [r.value for r in world(1).bus.read(f"{NS}.events", 0)]
