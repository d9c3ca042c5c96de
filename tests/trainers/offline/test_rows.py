"""Rows come with their places, from every kind of file, and what is no row says why."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from millrace.trainers.errors import BadData
from millrace.trainers.offline.rows import read
from tests.support import lessons

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": None}]


def test_lines_have_numbers_and_problems(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1, "b": null}\n\n{"a": \n[1]\n\xff\n{"a": 2}')
    rows = list(read(path))
    assert [row.where for row in rows] == [f"{path}:{n}" for n in (1, 3, 4, 5, 6)]
    assert [row.content for row in rows if row.problem is None] == [{"a": 1}, {"a": 2}]
    problems = [str(row.problem) for row in rows[1:4]]
    assert ["not JSON" in problems[0], "not a JSON object" in problems[1], "not JSON" in problems[2]] == [True] * 3


def test_a_saved_dataset_reads_as_its_rows(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    rows = list(read(tmp_path / "one"))
    assert [dict(row.content) for row in rows] == [ROWS[0], {"prompt": "c"}]
    assert rows[1].where == f"{tmp_path / 'one'}:1"


def test_of_several_splits_train_is_read(tmp_path: Path) -> None:
    train, other = datasets.Dataset.from_list(ROWS[:1]), datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=train, test=other).save_to_disk(str(tmp_path / "both"))
    assert len(list(read(tmp_path / "both"))) == 1
    datasets.DatasetDict(test=other).save_to_disk(str(tmp_path / "test"))
    with pytest.raises(BadData, match="splits test"):
        list(read(tmp_path / "test"))


def test_a_directory_of_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "data" / "train-0.parquet"))
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "data" / "test-0.parquet"))
    assert [row.where.rpartition("/")[2] for row in read(tmp_path)] == ["train-0.parquet:0", "train-0.parquet:1"]


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"there is no .*missing"):
        list(read(tmp_path / "missing"))
    with pytest.raises(BadData, match=r"no \.jsonl or \.parquet"):
        list(read(tmp_path))
    lessons.write(tmp_path / "rows.jsonl", ROWS)
    assert len(list(read(tmp_path))) == 2
