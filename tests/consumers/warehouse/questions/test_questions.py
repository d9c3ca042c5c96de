"""Every question against an answer that Python computes from the same records, on a run that holds what it is about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers.warehouse.endpoint.query import Query, QueryLimits, QueryRunner
from millrace.consumers.warehouse.questions import catalog
from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.directory import TableDirectory
from tests.support.answers import Answers, Rows
from tests.support.eventful import BRANCH, OTHER, eventful
from tests.support.filled import filled
from tests.support.players import POLICY
from tests.support.stores import KINDS
from tests.support.whole import Whole

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run() -> Whole:
    return eventful()


@pytest.fixture(scope="module")
def truth(run: Whole) -> Answers:
    return Answers(run, branch=BRANCH)


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest, run: Whole, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with filled(run.bus, tmp_path_factory.mktemp("warehouse"), request.param) as store:
        yield store


def ask(store: Store, name: str, *columns: str, **given: object) -> Rows:
    """The answer to a question; of these columns alone, where any are named."""
    question = catalog.questions()[name]
    if any(parameter.name == "policy" and parameter.default is None for parameter in question.parameters):
        given = {"policy": POLICY, **given}
    values = catalog.values(question, {key: str(value) for key, value in given.items()})
    with store.client() as client:
        found = client.query(question.sql, parameters=values)
    at = [found.column_names.index(column) for column in columns or found.column_names]
    return [tuple(row[place] for place in at) for row in found.result_rows]


def to_reader(store: Store, reader: QueryRunner | None, sql: str, values: dict[str, str]) -> bytes:
    """What a reader gets, a row a line: of a directory past the guard, of a server with the setting `readonly`."""
    if reader is not None:
        return b"".join(reader.ask(Query(sql, values, form="JSONEachRow")).pieces())
    with store.client() as client:
        return client.raw_query(sql, parameters=values, settings={"readonly": "1"}, fmt="JSONEachRow")


def agree(found: Rows, expected: Rows, *, ordered: bool = True) -> None:
    """The same rows; numbers may differ in their last digits, since they are added in another order."""
    assert expected, "the run holds nothing that this asks about"
    if not ordered:
        found, expected = (sorted(rows, key=lambda row: [str(cell) for cell in row[:2]]) for rows in (found, expected))
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert all(_same(cell, other) for cell, other in zip(row, wanted, strict=True)), (row, wanted)


def _same(cell: Any, other: Any) -> bool:
    if isinstance(cell, float) and isinstance(other, int | float):
        return cell == pytest.approx(other)
    return bool(cell == other)


def test_a_trajectory_step_by_step(store: Store, truth: Answers) -> None:
    for sample in truth.every_sample:
        expected = truth.trajectory(sample["id"])
        assert ask(store, "trajectory", "sub_agent", "step", "kind", "status", trajectory=sample["id"]) == expected
    kinds = {row[2] for sample in truth.every_sample for row in truth.trajectory(sample["id"])}
    assert {"tool_call", "tool_result", "reward", "gap"} <= kinds


def test_what_trained_a_version(store: Store, truth: Answers) -> None:
    versions = {version for version, *_ in truth.trained}
    assert len(versions) > 5
    for version in versions:
        agree(ask(store, "trained-by", version=version), truth.trained_by(version))
    assert ask(store, "trained-by", version=max(versions) + 1) == []


def test_what_trained_a_version_of_a_branch(store: Store, truth: Answers) -> None:
    """Its numbers are not those of the policy that sampled: nothing is stale, and it has no place in the order."""
    for version in {version for version, *_ in truth.branched}:
        agree(ask(store, "trained-by", policy=BRANCH, version=version), truth.trained_by(version, branch=True))
    assert ask(store, "staleness-by-version", policy=BRANCH) == []
    stale = "SELECT count() FROM samples WHERE sampled_from != policy AND (isNotNull(staleness_sum) OR isNotNull(seq))"
    assert store.rows(stale, database="millrace") == [(0,)]
    assert store.rows("SELECT DISTINCT policy FROM staleness", database="millrace") == [(POLICY,)]


def test_which_versions_saw_something(store: Store, truth: Answers) -> None:
    sample = truth.trained[5][3]
    wanted: list[dict[str, str]] = [
        {},
        {"trajectory": sample["id"]},
        {"task": "sum"},
        {"tenant": "acme"},
        {"model": "p"},
    ]
    wanted.append({"task": "sort", "tenant": "globex", "model": "p"})
    wanted += [{"policy": BRANCH}, {"policy": POLICY, "trajectory": sample["id"]}, {"policy": BRANCH, "model": "p"}]
    for filters in wanted:
        columns = ("policy", "version", "samples", "groups", "tokens")
        agree(ask(store, "seen-by", *columns, **filters), truth.seen_by(**filters))
    assert [row[0] for row in truth.seen_by(trajectory=sample["id"])] == [BRANCH, POLICY]
    assert len(truth.seen_by(task="sum")) > 2, "no task came again"
    assert ask(store, "seen-by", model="big-model") == truth.seen_by(model="big-model") == []


def test_staleness_by_version(store: Store, truth: Answers) -> None:
    agree(ask(store, "staleness-by-version"), truth.staleness_by_version())
    agree(ask(store, "staleness-by-version", since=3), truth.staleness_by_version(3))
    assert any(row[2] > 0 for row in truth.staleness_by_version())


def test_reward_by_version_task_and_engine(store: Store, truth: Answers) -> None:
    agree(ask(store, "reward-by-version"), truth.reward_by_version())
    for split in ("train", "evaluation"):
        columns = ("task", "samples", "without_reward", "mean", "spread")
        agree(ask(store, "reward-by-task", *columns, split=split), truth.reward_by_task(split))
    agree(ask(store, "reward-by-engine"), truth.reward_by_engine())
    assert len(truth.reward_by_engine()) == 2


def test_the_funnel_of_dispositions(store: Store, truth: Answers) -> None:
    agree(ask(store, "funnel"), truth.funnel(), ordered=False)
    held = {row[:2] for row in truth.funnel()}
    rewards = (
        "counted",
        "failed",
        "late_reward",
        "superseded_reward",
        "duplicate_reward",
        "superseded",
        "failed_sample",
    )
    assert {("reward", fate) for fate in (*rewards, "replayed", "orphan")} <= held
    assert {("group", fate) for fate in ("ready", "failed", "expired", "declined")} <= held


def test_every_reward_has_the_fate_that_the_records_prove(store: Store, truth: Answers) -> None:
    assert {
        (part, off): fate for part, off, fate in store.rows("SELECT part, off, fate FROM millrace.rewards")
    } == dict(truth.fates().items())


def test_where_groups_wait(store: Store, truth: Answers) -> None:
    agree(ask(store, "waits-by-version"), truth.waits_by_version())


def test_tokens_cost_and_latency_by_tenant_and_model(store: Store, truth: Answers) -> None:
    counted = ("calls", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")
    columns = ("policy", "tenant", "model", "engine", *counted)
    agree(ask(store, "costs-by-tenant", *columns), truth.costs_by_tenant())
    agree(ask(store, "costs-by-tenant", *columns, tenant="acme"), truth.costs_by_tenant("acme"))
    for policy in (POLICY, OTHER):
        agree(ask(store, "costs-by-tenant", *columns, policy=policy), truth.costs_by_tenant(policy=policy))
    assert ask(store, "costs-by-tenant", days=1) == [], "the run is years old"
    latencies = {
        (tenant, engine): (median, high)
        for tenant, engine, median, high in ask(
            store, "costs-by-tenant", "tenant", "engine", "latency_ms_p50", "latency_ms_p95", policy=POLICY
        )
    }
    bodies = [(event["tenant"], body) for _, event, body in truth.of_kind("model_call")]
    for (tenant, engine), (median, high) in latencies.items():
        known = sorted(body["latency_us"] / 1000 for who, body in bodies if (who, body["engine"]) == (tenant, engine))
        assert known[0] <= median <= high <= known[-1]
        assert sum(one <= high for one in known) >= 0.95 * len(known) - 1


def test_tool_failures(store: Store, truth: Answers) -> None:
    columns = ("policy", "tool", "calls", "ok", "error", "timeout", "refused", "unanswered")
    agree(ask(store, "tool-failures", *columns), truth.tool_failures(), ordered=False)
    own = truth.tool_failures(POLICY)
    assert all(min(row[2:6]) > 0 and row[7] > 0 for row in own), "a tool never fails in some way"
    agree(ask(store, "tool-failures", *columns, policy=POLICY), own, ordered=False)
    assert [row[:2] for row in ask(store, "tool-failures", *columns, policy=OTHER)] == [(OTHER, "search")]
    assert len(ask(store, "tool-failures", tool="search")) == 2


def test_late_rewards_and_what_they_would_have_changed(store: Store, truth: Answers) -> None:
    found = ask(store, "late-rewards", "trajectory", "value", "reward", "would_be")
    agree(found, truth.late_rewards(), ordered=False)
    assert any(row[2] is None and row[3] is not None for row in found), "no late reward would have saved its sample"
    assert any(row[2] == row[3] for row in found), "no late reward was one too many"
    for change, group, would_be in ask(store, "late-rewards", "change", "group_reward", "group_would_be"):
        if change is not None:
            assert would_be == pytest.approx(group + change / 2)


def test_two_versions_on_the_same_tasks(store: Store, truth: Answers) -> None:
    met = [(a, b) for a in range(8) for b in range(a + 1, 9) if truth.compare(a, b)]
    assert len(met) > 5
    for a, b in met:
        agree(ask(store, "compare", a=a, b=b), truth.compare(a, b))


def test_what_a_version_was_evaluated_at(store: Store, truth: Answers) -> None:
    columns = ("how", "tasks", "questions", "answers", "mean")
    for version in (0, 2, 8):
        agree(ask(store, "evaluated", *columns, version=version), truth.evaluated(version))
    assert ask(store, "evaluated", version=1) == truth.evaluated(1) == []


def test_every_question_is_answered_to_readers(store: Store, run: Whole) -> None:
    """By the guarded reader of a directory, or by a server that is told `readonly`."""
    reader = QueryRunner(store.handle, QueryLimits()) if isinstance(store, TableDirectory) else None
    ids = {"trajectory": next(iter(Answers(run).sealed.values()))["id"], "version": "2", "a": "2", "b": "5"}
    for name, question in catalog.questions().items():
        wanted = {"policy": POLICY, **ids}
        given = {each.name: each.default or wanted.get(each.name, "") for each in question.parameters}
        if name == "seen-by":
            given["trajectory"] = ""
        answer = to_reader(store, reader, question.sql, catalog.values(question, given))
        assert answer.count(b"\n") == len(ask(store, name, **given)) > 0, name


def test_every_question_has_a_test_here() -> None:
    tested = Path(__file__).read_text()
    assert [name for name in catalog.questions() if f'"{name}"' not in tested] == []
