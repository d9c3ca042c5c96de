"""Rows are the same out of every kind of file, and what is no file of rows says so."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import orjson
import pyarrow as pa
import pytest
from pyarrow import parquet

from millrace.formats.episodes.rows import BadRow, micros
from millrace.formats.files import reader
from millrace.infra.errors import ImportRefused
from millrace.schemas import bounds
from tests.support.imported import AT, TALK, read, write

ROWS = [{"messages": TALK, "reward": n / 4, "note": None if n % 2 else "x"} for n in range(150)]
COLUMNS = [{**row, "messages": [{"role": one["role"], "content": str(one["content"])} for one in TALK]} for row in ROWS]


def contents(path: Path) -> list[object]:
    refused: list[BadRow] = []
    rows = list(reader(path).rows(lambda number, error: refused.append(error), lambda done, total: None))
    assert refused == []
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    return [row.content for row in rows]


def test_lines_gzip_parquet_and_datasets_hold_the_same_rows(tmp_path: Path) -> None:
    import datasets

    plain = write(tmp_path / "rows.jsonl", COLUMNS)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    parquet.write_table(pa.Table.from_pylist(COLUMNS), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(COLUMNS).save_to_disk(str(tmp_path / "rows"))
    expected = contents(plain)
    assert len(expected) == len(COLUMNS)
    assert "note" not in orjson.loads(orjson.dumps(expected[1])), "nulls are left out"
    for name in ("rows.jsonl.gz", "rows.parquet", "rows"):
        assert contents(tmp_path / name) == expected, name
    found = [[records for _, records in read(tmp_path / name)[0]] for name in ("rows.jsonl", "rows.parquet", "rows")]
    assert found[0] == found[1] == found[2], "and they become the same events"


def test_what_cannot_be_read_on_is_named(tmp_path: Path) -> None:
    packed = tmp_path / "rows.gz"
    packed.write_bytes(gzip.compress(write(tmp_path / "rows", ROWS).read_bytes())[:-20])
    broken = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(COLUMNS), broken)
    broken.write_bytes(broken.read_bytes()[:-100])
    (tmp_path / "folder").mkdir()
    splits = tmp_path / "splits"
    (splits / "train").mkdir(parents=True)
    (splits / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for path, words in (
        (packed, "cannot be read behind line"),
        (broken, "as Parquet"),
        (tmp_path / "folder", "no dataset"),
        (splits, "name one of them, as .*splits/train"),
    ):
        with pytest.raises(ImportRefused, match=words):
            contents(path)


def test_a_line_beyond_its_bound_is_passed_over_without_being_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "ROW_BYTES", 1 << 16)
    path = tmp_path / "rows"
    path.write_bytes(b'{"a": 1}\n{"b": "' + b"x" * (8 << 20) + b'"}\n{"c": 3}\n')
    refused: list[tuple[int, str]] = []
    tracemalloc.start()
    rows = [
        row.number
        for row in reader(path).rows(lambda number, error: refused.append((number, error.code)), lambda *_: None)
    ]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (rows, refused) == ([1, 3], [(2, "row_too_large")])
    assert peak < 2 << 20


@pytest.mark.parametrize(
    "value",
    [
        1714557600,
        1714557600.0,
        "1714557600",
        1714557600000,
        AT,
        AT * 1000,
        "2024-05-01T10:00:00Z",
        "2024-05-01 12:00+02:00",
    ],
)
def test_a_time_is_read_in_any_usual_unit(value: object) -> None:
    assert micros(value, "time") == AT


@pytest.mark.parametrize("value", ["", "soon", -1, True, float("nan"), float("inf"), 1e30, [], "9" * 400])
def test_what_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(BadRow, match="time is no time"):
        micros(value, "time")
