"""Which engine `millrace drain` tells to stop."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.apps.cli.engines import find_engine
from millrace.infra.errors import LookError
from millrace.infra.workers import status
from millrace.schemas import codec


def engine(name: str, state: Any = "serving", lives_s: float = 60, *, draining: bool = False) -> Any:
    said = status(
        "t.workers",
        worker=name,
        incarnation="1",
        role="engine",
        state=state,
        policy="p",
        lives_s=lives_s,
        url=f"http://{name}.test",
        draining=draining,
    )
    return codec.decode_as("WorkerStatus", said.value or b"")


def test_an_engine_is_told_by_its_name_or_its_url() -> None:
    engines = [engine("one"), engine("two"), engine("three", "stopped", draining=True)]
    for name in ("two", "http://two.test", "http://two.test/"):
        assert find_engine(engines, name, "p")["worker"] == "two"
    assert find_engine(engines, "three", "p")["state"] == "stopped", "it is drained already"


@pytest.mark.parametrize("other", [engine("two", lives_s=-1), engine("two", "starting"), engine("two", "stopped")])
def test_one_that_does_not_serve_is_none(other: Any) -> None:
    with pytest.raises(LookError, match="no engine two of policy p serves now; those that do: one"):
        find_engine([engine("one"), other], "two", "p")
    with pytest.raises(LookError, match="those that do: none"):
        find_engine([], "two", "p")
