"""A weight event is a version only when what it names stays inside the version's directory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.reloader.core import fault_of
from tests.support.odd import records
from tests.support.players import Plan, version_zero


def event(**over: Any) -> Any:
    plan = Plan(None, 2, 1, 1, 1, "reserve", 0.0, "drop")  # type: ignore[arg-type]
    return {**version_zero(plan)[0], **over}


def test_an_event_of_ours_is_a_version() -> None:
    assert fault_of(event(), "p") is None
    assert fault_of(event(files={"model.safetensors": "0", "a/b.json": "1"}, version=3, parent=2), "p") is None
    assert fault_of(event(parent=9, parent_policy="another"), "p") is None


@pytest.mark.parametrize(
    "over",
    [
        {"policy": "other"},
        {"version": -1},
        {"version": 2**62},
        {"version": 4, "parent": 4},
        {"version": 4, "parent": 9},
        {"version": 4, "parent": 9, "parent_policy": "another"},
        {"parent": 9},
        {"parent": -1, "parent_policy": "another"},
        {"parent": 9, "parent_policy": "another", "mode": "delta"},
        {"digest": "../../etc"},
        {"files": {"../../victim/settings.json": "0"}},
        {"files": {"/etc/passwd.json": "0"}},
        {"files": {"a/../../b.json": "0"}},
        {"files": {"a\x00.json": "0"}},
        {"files": {"": "0"}},
    ],
)
def test_an_event_that_makes_no_sense_is_none(over: dict[str, Any]) -> None:
    assert fault_of(event(**over), "p") is not None


@given(st.data())
def test_any_event_is_judged(data: st.DataObject) -> None:
    drawn: Any = data.draw(records("WeightVersion"))
    fault_of(drawn, "p")
