"""What a change of the number of a gateway's processes leaves behind, and for how long."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.config import Settings, load
from millrace.infra.errors import ConfigError
from millrace.infra.gateway_processes import (
    INDEX,
    counts,
    folder_of,
    is_drained,
    mark_drain,
    note,
    own_index,
    retired_indexes,
    with_folder,
)

HOUR = 3600 * 1_000_000


def settings(folder: Path, processes: int, hours: float = 24) -> Settings:
    flags = {"home": str(folder), "gateway.processes": str(processes), "topics.short_hours": str(hours)}
    return load(flags=flags)


def test_the_first_folder_is_that_of_one_process(tmp_path: Path) -> None:
    made = settings(tmp_path, 1)
    assert made.gateway.capture_dir == folder_of(made.gateway.capture_dir, 0) == tmp_path / "capture"
    assert folder_of(made.gateway.capture_dir, 2) == tmp_path / "capture-2"
    assert with_folder(made, tmp_path / "x").gateway.capture_dir == tmp_path / "x"


def test_a_gateway_of_before_was_one_process_if_there_was_any(tmp_path: Path) -> None:
    made = settings(tmp_path, 2)
    assert note(made, HOUR) == ()
    (tmp_path / "other" / "capture").mkdir(parents=True)
    (tmp_path / "other" / "capture" / "lock").touch()
    assert note(settings(tmp_path / "other", 2), 30 * HOUR) == (1,)
    assert note(settings(tmp_path / "other", 2), 31 * HOUR) == (1,), "a restart forgets nothing"


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), min_size=1, max_size=8))
def test_a_number_is_known_for_as_long_as_its_sessions_may_be(
    tmp_path_factory: pytest.TempPathFactory, starts: list[tuple[int, int]]
) -> None:
    folder, now, ended = tmp_path_factory.mktemp("home"), HOUR, dict[int, int]()
    before = None
    for processes, hours in starts:
        now += hours * HOUR
        if before is not None and before != processes:
            ended[before] = now
        ended.pop(processes, None)
        before = processes
        former = note(settings(folder, processes), now)
        (folder / "capture").mkdir(exist_ok=True)
        (folder / "capture" / "lock").touch()  # as its capture log does next
        assert {count for count, at in ended.items() if now - at <= 24 * HOUR} == set(former)
        assert counts(settings(folder, processes), now)[-1].processes == processes


def test_one_process_keeps_nothing_of_its_number(tmp_path: Path) -> None:
    """Also on a disk that takes nothing it starts."""
    made = settings(tmp_path, 1)
    assert note(made, HOUR) == ()
    assert not made.gateway.capture_dir.exists()
    made.gateway.capture_dir.mkdir(parents=True)
    (made.gateway.capture_dir / "lock").touch()
    assert note(made, 2 * HOUR) == ()
    assert [path.name for path in made.gateway.capture_dir.iterdir()] == ["lock"]


def test_those_beyond_the_number_are_retired_while_they_may_hold_something(tmp_path: Path) -> None:
    note(settings(tmp_path, 3), HOUR)
    (tmp_path / "capture-1").mkdir()
    assert retired_indexes(settings(tmp_path, 1), 2 * HOUR) == [1]
    assert retired_indexes(settings(tmp_path, 2), 2 * HOUR) == []
    assert retired_indexes(settings(tmp_path, 4), 2 * HOUR) == []
    mark_drain(tmp_path / "capture", 1, is_drained=True)
    assert is_drained(tmp_path / "capture", 1)
    assert retired_indexes(settings(tmp_path, 1), 2 * HOUR) == []
    mark_drain(tmp_path / "capture", 1, is_drained=False)
    assert not is_drained(tmp_path / "capture", 1)
    note(settings(tmp_path, 1), 2 * HOUR)
    assert retired_indexes(settings(tmp_path, 1), 26 * HOUR) == [1]
    assert retired_indexes(settings(tmp_path, 1), 27 * HOUR) == []


def test_an_odd_index_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INDEX, raising=False)
    assert own_index() == 0
    monkeypatch.setenv(INDEX, "3")
    assert own_index() == 3
    monkeypatch.setenv(INDEX, "x")
    with pytest.raises(ConfigError, match="the first is 0"):
        own_index()
