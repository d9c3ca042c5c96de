"""Tasks from files, and the loader that numbers them once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from millrace.infra.errors import BusError, ConfigError
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.memory.bus import MemoryBus
from millrace.producers.tasks.loader import Loader
from millrace.producers.tasks.source import open_tasks
from millrace.schemas import codec


@pytest.fixture
def bus() -> MemoryBus:
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec("t.p.prompts", 1), TopicSpec("t.p.resolutions", 1)])
    return bus


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    rows = [{"id": f"a{n}", "messages": [], "answer": "ü" * n} for n in range(5)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    return path


def loader(bus: MemoryBus, path: Path, **kw: Any) -> Loader:
    return Loader(bus, "t", "p", open_tasks(path), **{"ahead": 3, **kw})


def prompts(bus: MemoryBus) -> list[dict[str, Any]]:
    return [codec.decode_as("Prompt", record.value or b"") for record in bus.read("t.p.prompts", 0)]


def resolve(bus: MemoryBus, *ids: str) -> None:
    with bus.publisher() as publisher:
        for id in ids:
            record = {
                "kind": "ready", "policy": "p", "ticket": 0, "seq": 0, "group": "0", "prompt_id": id, "solicited": True,
                "size": 1, "trajectories": [], "tokens": [], "rewards": [], "v_head": 0, "v_tail": 0, "min_version": 0,
                "deadline": 0, "reason": None, "setting": None, "time": 0,
            }  # fmt: skip
            publisher.publish(Outgoing("t.p.resolutions", b"0", codec.encode("Resolution", record))).result(5)


def test_a_bounded_number_is_kept_ahead(bus: MemoryBus, path: Path):
    one = loader(bus, path)
    assert [one.step(0.01), one.step(0.01)] == [3, 0]
    resolve(bus, "a0", "a1")
    assert one.step(0.1) == 2
    found = prompts(bus)
    assert [prompt["number"] for prompt in found] == list(range(5))
    assert [prompt["id"] for prompt in found] == [f"a{n}" for n in range(5)]
    assert json.loads(found[2]["task"])["answer"] == "üü"


def test_a_restart_goes_on_and_fences_the_former_loader(bus: MemoryBus, path: Path):
    one = loader(bus, path)
    one.step(0.01)
    resolve(bus, "a0", "a1", "a2")
    two = loader(bus, path)
    assert two.number == 3
    assert not two.unresolved
    with pytest.raises(BusError):
        one.step(0.1)
    two.step(0.01)
    assert [prompt["number"] for prompt in prompts(bus)] == list(range(6))
    assert prompts(bus)[5]["id"] == "a0@1"


def test_epochs_end(bus: MemoryBus, path: Path):
    one = loader(bus, path, ahead=100, epochs=2)
    assert one.step(0.01) == 10
    assert one.is_done
    assert one.step(0.01) == 0
    assert len({prompt["id"] for prompt in prompts(bus)}) == 10


def test_a_dataset_directory(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "data" / "train-0.jsonl").write_text('{"q": 1}\n')
    (tmp_path / "data" / "test-0.jsonl").write_text('{"q": 2}\n{"q": 3}\n')
    source = open_tasks(tmp_path)
    assert len(source) == 1
    assert (source.task(0), source.id(0, 0), source.id(0, 2)) == ({"q": 1}, "task-0", "task-0@2")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", "", "has no tasks"),
        ("t.jsonl", "{}\n{broken\n", r"t\.jsonl:2 is not JSON"),
        ("t.jsonl", "[1]\n", "is no JSON object"),
        ("t.jsonl", b"\xff\xfe\n", "is not JSON"),
        ("t.parquet", b"PAR1", r"t\.parquet is no whole \.parquet file"),
        ("t.arrow", b"nothing at all", r"t\.arrow is no whole \.arrow file"),
        ("x/README", "", "holds no .jsonl"),
        ("missing", None, "there is no"),
    ],
)
def test_bad_files_are_refused_at_the_start(tmp_path: Path, name: str, content: Any, message: str):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        open_tasks(path.parent if name.startswith("x/") else path)


def test_datasets_of_hugging_face_are_read(tmp_path: Path):
    rows = [{"id": str(n), "messages": [{"role": "user", "content": "x"}], "answer": str(n)} for n in range(3)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    Dataset.from_list(rows).to_parquet(tmp_path / "t.parquet")
    for path in (tmp_path / "saved", tmp_path / "t.parquet"):
        tasks = open_tasks(path)
        assert [tasks.task(n) for n in range(len(tasks))] == rows


def test_tasks_that_share_an_id_are_kept_ahead_in_the_same_number(bus: MemoryBus, tmp_path: Path):
    path = tmp_path / "same.jsonl"
    path.write_text('{"id": "x"}\n' * 4)
    one = loader(bus, path)
    assert [one.step(0.01), one.step(0.01)] == [3, 0]
    resolve(bus, "x")
    assert [one.step(0.1), one.step(0.01)] == [1, 0]
    assert loader(bus, path).unresolved.total() == 3
