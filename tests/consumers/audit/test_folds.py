"""The audit folds with what the stages had, and what it cannot have is a note."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.consumers.audit import audit, folds
from millrace.consumers.audit.folds import production
from millrace.infra.config import Governance, Settings
from millrace.infra.errors import ReplayError, UnreachableError
from millrace.infra.stages.base import Stage
from millrace.streams import serve
from millrace.streams.refine.names import FILE
from millrace.streams.refine.stage import Refine
from millrace.testing.world import NAMESPACE
from tests.support.players import POLICY
from tests.support.whole import Planted, Whole, whole

FACTS: Any = SimpleNamespace(begins_at_zero=lambda kind: True)


@pytest.fixture(scope="module")
def history() -> Whole:
    return whole(2)


def refine_with(history: Whole, **how: Any) -> Any:
    stages: dict[str, Stage] = {
        **history.stages,
        "refine": Refine(Governance(), [Planted()], slots=history.bus.partitions(history.topic("raw")), **how),
    }
    makers = {role: lambda _, s=stage: s for role, stage in stages.items()}
    return audit(history.bus, NAMESPACE, POLICY, makers=makers)


@pytest.mark.slow  # it starts refine's detectors
def test_refine_is_folded_with_the_keys_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(serve, "Refine", lambda rules, detectors, **how: given.update(how))
    settings = Settings(home=tmp_path, governance={"name_key": "names"}, reward={"key": "judges"})
    with ExitStack() as held:
        production(settings, held)["refine"](FACTS)
    assert (given["name_key"], given["reward_key"]) == (b"names", "judges")


def test_no_key_is_made_where_refine_never_ran(tmp_path: Path) -> None:
    with ExitStack() as held, pytest.raises(ReplayError, match="name_key"):
        production(Settings(home=tmp_path), held)["refine"](FACTS)
    assert not (tmp_path / FILE).exists()


def test_a_history_with_replaced_names_is_clean(history: Whole) -> None:
    replaced = [row for _, row in history.rows("events") if row["attempt"].startswith("redacted-")]
    assert replaced
    report = history.audit()
    assert report.clean, report.violations[:3]
    assert refine_with(history, name_key=b"names").clean


def test_names_replaced_under_another_key_are_a_note(history: Whole) -> None:
    report = refine_with(history, name_key=b"another")
    assert report.clean, report.violations[:3]
    assert any("another key" in note for note in report.finding("folds").notes)


def test_a_log_that_stops_answering_while_it_folds_is_no_violation(
    history: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit ends with what is to be done about it, and says nothing of the history."""

    def silent(*_: Any) -> Any:
        raise UnreachableError("no answer in 30 s")

    monkeypatch.setattr(folds, "refold", silent)
    with pytest.raises(UnreachableError, match="no answer"):
        history.audit()
