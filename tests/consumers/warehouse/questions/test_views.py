"""Views against what the ledger itself says of every version, over seeded histories with every kind of fault; and what
the views say of themselves."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.consumers.learner.version.records import histogram
from millrace.consumers.warehouse.questions import views
from millrace.consumers.warehouse.store.base import Store
from tests.support.answers import Answers
from tests.support.eventful import eventful
from tests.support.filled import filled
from tests.support.stores import KINDS
from tests.support.whole import Whole, whole

pytestmark = pytest.mark.slow

HISTORIES = int(os.environ.get("MILLRACE_HISTORIES_OF_VIEWS", "3"))
AGES = 8


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_views_equal_the_ledger_for_every_version(seed: int, tmp_path: Path) -> None:
    """Tokens, samples, mean reward, mean and spread of staleness; then the rows behind them, against the records."""
    history = whole(seed)
    with filled(history.bus, tmp_path) as store:
        check_versions(store, history)
        check_samples(store, history)


def check_versions(store: Store, history: Whole) -> None:
    batches = {
        version: told
        for version, *told in store.rows(
            "SELECT version, count(), sum(s.tokens), avg(s.reward), sum(staleness_sum) / sum(s.tokens)"
            " FROM samples AS s GROUP BY version",
            database="millrace",
        )
    }
    ages: dict[int, list[float]] = {}
    for version, age, tokens in store.rows("SELECT version, age, tokens FROM staleness", database="millrace"):
        ages.setdefault(version, [0.0] * (AGES + 1))[min(age, AGES)] += tokens
    said = store.rows("SELECT version, samples, tokens, reward, staleness FROM versions", database="millrace")
    entries = [entry for _, entry in history.rows("ledger")]
    assert len(entries) > 3
    assert len(said) == len(entries)
    for entry in entries[1:]:
        version, metrics = entry["version"], entry["metrics"]
        samples, tokens, reward, staleness = batches[version]
        assert (samples, tokens) == (metrics["samples"], metrics["tokens_trainable"])
        assert math.isclose(reward, metrics["reward_mean"], rel_tol=1e-12, abs_tol=1e-12)
        assert math.isclose(staleness, metrics["staleness_mean"], rel_tol=1e-12, abs_tol=1e-12)
        assert histogram(ages[version]) == {
            name: count for name, count in metrics.items() if name.startswith("staleness_tokens_")
        }
        row = (version, samples, tokens, metrics["reward_mean"], metrics["staleness_mean"])
        assert row in said


def check_samples(store: Store, history: Whole) -> None:
    truth = Answers(history)
    found = store.rows("SELECT version, part, off, trajectory, staleness_sum FROM samples", database="millrace")
    expected = [
        (version, *spot, sample["id"], sum(truth.ages(version, sample))) for version, _, spot, sample in truth.trained
    ]
    assert sorted(found) == sorted(expected)
    fates = store.rows("SELECT part, off, fate FROM rewards", database="millrace")
    assert len(fates) == len(truth.of_kind("reward")), "a judgement is told twice"
    assert {(part, off): fate for part, off, fate in fates} == truth.fates()


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with filled(eventful().bus, tmp_path_factory.mktemp("warehouse"), request.param) as store:
        yield store


def test_a_view_explains_itself_and_its_columns(store: Store) -> None:
    told = dict(store.rows("SELECT name, comment FROM system.tables WHERE database = 'millrace'"))
    assert told == {view.name: view.doc for view in views.views()}
    for view in views.views():
        described = store.rows(f"DESCRIBE TABLE millrace.{view.name}")
        assert {name: comment for name, _, _, _, comment, *_ in described} == view.names


def test_no_view_loses_or_doubles_a_row(store: Store) -> None:
    """Joins add columns, never rows."""
    same = {
        "steps": "events",
        "model_calls": "events WHERE kind = 'model_call'",
        "tool_calls": "events WHERE kind = 'tool_call'",
        "rewards": "events WHERE kind = 'reward'",
        "trajectories": "trajectories",
        "samples": "ledger ARRAY JOIN arrayFlatten(`groups.trajectories`)",
        "trained": "ledger ARRAY JOIN arrayFlatten(`groups.trajectories`)",
        "versions": "weights",
        "groups": "resolutions WHERE kind != 'setting'",
        "evaluations": "scores",
        "dead_letters": "dead_letters",
    }
    for view, source in same.items():
        where = " WHERE split = 'train'" if view == "trajectories" else ""
        ((rows,),) = store.rows(f"SELECT count() FROM millrace.{view}{where}")
        ((wanted,),) = store.rows(f"SELECT count() FROM millrace_log.{source}")
        assert rows == wanted > 0, view
    ((waits, grants),) = store.rows("SELECT count(), uniqExact(policy, ticket) FROM millrace.waits")
    assert waits == grants == store.rows("SELECT uniqExact(policy, ticket) FROM millrace_log.grants")[0][0]
    ((calls, tokens),) = store.rows("SELECT sum(calls), sum(c.completion_tokens) FROM millrace.costs AS c")
    assert [(calls, tokens)] == store.rows("SELECT count(), sum(m.completion_tokens) FROM millrace.model_calls AS m")


def test_a_sub_agent_has_a_trace_of_its_own(store: Store) -> None:
    found = store.rows("SELECT trajectory, trace, parent_trace FROM millrace.steps WHERE trace != trajectory")
    assert found
    assert {parent for _, _, parent in found if parent} == {trajectory for trajectory, *_ in found}
    assert store.rows("SELECT count() FROM millrace.model_calls WHERE trace != trajectory") != [(0,)]


def test_a_place_leads_back_to_the_record(store: Store) -> None:
    """What a view calls topic, part and off is what replay reads."""
    wrong = store.rows(
        "SELECT count() FROM millrace.samples AS s LEFT ANTI JOIN millrace_log.trajectories AS t"
        " ON t.topic = s.topic AND t.part = s.part AND t.off = s.off AND t.id = s.trajectory"
    )
    assert wrong == [(0,)]


def test_views_of_another_release_go_and_others_are_replaced(store: Store) -> None:
    store.run("CREATE VIEW former AS SELECT 1 AS one", "millrace")
    store.run("CREATE OR REPLACE VIEW versions AS SELECT 1 AS version", "millrace")
    views.install(store)
    names = {name for (name,) in store.rows("SELECT name FROM system.tables WHERE database = 'millrace'")}
    assert names == {view.name for view in views.views()}
    assert store.rows("SELECT count() FROM millrace.versions WHERE digest != ''") != [(0,)]
