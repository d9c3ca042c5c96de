"""Selections by SQL: what gives places, what does not, and that no query reaches what may not be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.consumers.replay import sql_selection
from millrace.consumers.replay.selection import ELSEWHERE, EVALUATION, TWICE, UNREADABLE, SelectionResult
from millrace.consumers.warehouse.client import Asking, InDirectory
from millrace.consumers.warehouse.endpoint.faults import QueryError
from millrace.consumers.warehouse.endpoint.query import QueryLimits as Bounds
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.infra.config import Settings, load
from millrace.infra.errors import QuestionError, WarehouseError
from millrace.infra.log.base import Place
from millrace.infra.log.history.kinds import EVALUATIONS, TRAJECTORIES, topics_of
from millrace.infra.log.history.reader import History
from tests.consumers.replay.test_selection import check, made, selector
from tests.support.filled import filled
from tests.support.whole import NAMESPACE, POLICY

SEED = 1
NAMES = topics_of(NAMESPACE, POLICY)
pytestmark = pytest.mark.slow

TOPICS = (NAMES[TRAJECTORIES], NAMES[EVALUATIONS])


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a warehouse that holds a world with every disposition."""
    home = tmp_path_factory.mktemp("asked")
    with filled(made(SEED).bus, config(home).warehouse_home):
        pass
    return home


@pytest.fixture(scope="module")
def asking(tables: Path) -> Iterator[Asking]:
    directory = TableDirectory(config(tables).warehouse_home, memory_mb=512)
    with InDirectory(directory, Bounds()) as opened:
        yield opened


def config(home: Path) -> Settings:
    return load(None, {"policy.name": POLICY, "namespace": NAMESPACE, "home": str(home)})


def select(asking: Asking, sql: str) -> SelectionResult:
    """What a selector makes of a query's answer."""
    places, unknown = sql_selection.find_places(asking, sql_selection.one(sql), TOPICS)
    found = selector(SEED).by_places(places)
    found.left_out[sql_selection.UNKNOWN] += unknown
    return found


def rows() -> list[tuple[str, Place]]:
    return [(row["id"], row.place) for row in History(made(SEED).bus, NAMESPACE, POLICY).rows(TRAJECTORIES)]


def test_places_come_in_the_order_of_the_rows(asking: Asking) -> None:
    places, unknown = sql_selection.find_places(
        asking, "SELECT * FROM trajectories WHERE split = 'train' ORDER BY off, part", TOPICS
    )
    assert places == sorted((place for _, place in rows()), key=lambda p: (p.offset, p.partition))
    assert unknown == 0


def test_ids_are_looked_up_and_those_of_nobody_counted(asking: Asking) -> None:
    some = dict(rows()[::2])
    listed = ", ".join(f"'{name}'" for name in reversed(some))
    sql = f"SELECT arrayJoin([{listed}, 'nobody', {listed}]) AS trajectory"
    assert sql_selection.find_places(asking, sql, TOPICS) == ([*reversed(some.values())], 1)
    by_view = sql_selection.find_places(asking, "SELECT id FROM millrace_log.trajectories ORDER BY part, off", TOPICS)
    assert by_view == ([place for _, place in sorted(rows(), key=lambda one: one[1])], 0)
    sql = f"SELECT trajectory, count() FROM steps WHERE trajectory = '{rows()[0][0]}' GROUP BY ALL"
    assert sql_selection.find_places(asking, sql, TOPICS) == ([rows()[0][1]], 0), "as any view names them"


def test_many_ids_are_looked_up_in_parts(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sql_selection.find_places(asking, "SELECT trajectory FROM trajectories", TOPICS)
    monkeypatch.setattr(sql_selection, "AT_ONCE", 3)
    assert sql_selection.find_places(asking, "SELECT trajectory FROM trajectories", TOPICS) == whole
    assert len(whole[0]) > 6


def test_an_empty_answer_is_nothing(asking: Asking) -> None:
    assert sql_selection.find_places(asking, "SELECT topic, part, off FROM trajectories WHERE 0", TOPICS) == ([], 0)
    assert sql_selection.find_places(asking, "SELECT 1 AS a WHERE 0", TOPICS) == ([], 0)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT 1 AS a, 2 AS b", "the query gives a, b, .* select topic, part and off, or trajectory"),
        ("SELECT topic, part FROM trajectories", "the query gives topic, part"),
        ("SELECT 7 AS trajectory", "row 1 of the answer has the trajectory 7, which is no id"),
        ("SELECT NULL AS id", "has the id NULL"),
        ("SELECT 't' AS topic, arrayJoin([1, NULL]) AS part, 2 AS off", "row 2 of the answer is no place: .*NULL"),
        ("SELECT 't' AS topic, 'x' AS part, 2 AS off", "row 1 of the answer is no place"),
        ("SELECT 't' AS topic, true AS part, 2.5 AS off", "row 1 of the answer is no place"),
        ("SELECT 1; SELECT 2", "a selection is one query, and here are 2"),
        ("-- nothing", "here are 0"),
        ("SELECT topic, part, off FROM trajectories FORMAT CSV", "leave FORMAT out"),
        ("SELECT * FROM samplez", "samplez.*Tables: .*trajectories"),
        ("DROP TABLE trajectories", "read-only"),
        ("SELECT * FROM file('/etc/passwd')", "file"),
    ],
)
def test_what_gives_no_places_is_an_error_that_says_what_to_select(asking: Asking, sql: str, said: str) -> None:
    with pytest.raises((QuestionError, QueryError), match=rf"(?s){said}"):
        select(asking, sql)


SOURCES = [
    "SELECT topic, part, off FROM trajectories",
    "SELECT topic, part, off FROM trajectories WHERE split = 'evaluation'",
    "SELECT topic, part, off FROM millrace_log.evaluations",
    "SELECT topic, part, off FROM millrace_log.events",
    "SELECT topic, part, off FROM samples",
    "SELECT 'topic', toUInt16(0), toUInt64(0)",
    f"SELECT '{TOPICS[0]}', toUInt16(0), number FROM numbers(40)",
    f"SELECT '{TOPICS[1]}', toUInt16(number % 3), number FROM numbers(40)",
    f"SELECT '{TOPICS[0]}', toUInt16(65535), toUInt64(18446744073709551615)",
    f"SELECT replace('{TOPICS[1]}', 'evaluations', 'trajectories'), part, off FROM millrace_log.evaluations",
    f"SELECT '{TOPICS[0]}', place_partition, place_offset FROM millrace_log.dead_letters",
]
NAMED = [
    "SELECT trajectory FROM trajectories WHERE split != 'train' OR tokens = 0",
    "SELECT trajectory FROM steps",
    "SELECT trajectory FROM rewards",
    "SELECT id FROM millrace_log.evaluations",
    "SELECT trajectory FROM millrace_log.dead_letters WHERE trajectory != ''",
    "SELECT concat('x', toString(number)) FROM numbers(5)",
]


@st.composite
def hostile(draw: st.DrawFn) -> str:
    """A query that asks for whatever there is, in any order, as places or as ids."""
    places = draw(st.booleans())
    parts = draw(st.lists(st.sampled_from(SOURCES if places else NAMED), min_size=1, max_size=4))
    columns = "topic, part, off" if places else draw(st.sampled_from(sql_selection.IDS))
    union = " UNION ALL ".join(parts)
    order = draw(st.sampled_from(["", " ORDER BY rand(1)", " LIMIT 7"]))
    given = columns.split(", ") if places else [columns]
    values = ", ".join(f"t.{at + 1} AS {name}" for at, name in enumerate(given))
    return f"SELECT {values} FROM (SELECT tuple(*) AS t FROM ({union})){order}"


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sql=hostile())
def test_whatever_a_query_asks_for_nothing_is_selected_that_may_not_train(asking: Asking, sql: str) -> None:
    check(SEED, select(asking, sql))


def test_what_is_asked_for_in_vain_is_counted(asking: Asking) -> None:
    found = select(asking, " UNION ALL ".join(SOURCES))
    assert {EVALUATION, ELSEWHERE, TWICE, UNREADABLE} <= set(+found.left_out)
    assert found.candidates, "and what may train is found among it"


def test_a_question_asks_the_warehouse_of_the_deployment(
    asking: Asking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = selector(SEED)
    sql = "SELECT * FROM trajectories ORDER BY off;"
    with pytest.raises(WarehouseError, match="there is no warehouse"):
        sql_selection.question(config(tmp_path), sql)(chosen)
    monkeypatch.setattr(sql_selection, "open_asking", lambda settings, overdue: nullcontext(asking))
    found = sql_selection.question(config(tmp_path), sql, lambda trajectory: trajectory["sample"] == 0)(chosen)
    places, _ = sql_selection.find_places(asking, sql_selection.one(sql), TOPICS)
    whole = chosen.by_places(places).candidates
    assert found.candidates == [one for one in whole if one.sample == 0]
    assert 0 < len(found.candidates) < len(whole)
