"""A selection by SQL: a query over the warehouse's views -> places, of which the learner's own reader fetches the
samples.

    rows with topic, part and off  -> these places
    rows with trajectory (or id)   -> where the trajectories of that id lie

Invariants: the query says where to look and nothing else: whatever it gives, a selector reads the log there and leaves
out what may not be used; the same rows in the same order give the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from millrace.consumers.replay.selection import Question, Rule, SelectionResult, Selector
from millrace.consumers.warehouse.client import Asking, leave, open_asking
from millrace.consumers.warehouse.statements import split
from millrace.infra.config import Settings
from millrace.infra.errors import QuestionError
from millrace.infra.log.base import Place
from millrace.infra.log.history.kinds import EVALUATIONS, TRAJECTORIES, topics_of

PLACE = ("topic", "part", "off")
IDS = ("trajectory", "id")
AT_ONCE = 500
"""ids that are looked up together: as many as a URL holds"""
LOOK = (
    "SELECT DISTINCT t.trajectory AS trajectory, t.topic AS topic, t.part AS part, t.off AS off "
    "FROM millrace.trajectories AS t WHERE t.topic IN {topics:Array(String)} AND t.trajectory IN {ids:Array(String)} "
    "ORDER BY topic, part, off"
)
UNKNOWN = "no trajectory of this policy has the id"


def question(settings: Settings, sql: str, rule: Rule = lambda _: True) -> Question:
    """What asks the warehouse of this deployment when it is called, by one query. Raises QuestionError for a text that
    is not one. wanted: a rule that each of its trajectories must meet too."""
    statement = one(sql)

    def ask(selector: Selector) -> SelectionResult:
        names = topics_of(settings.namespace, settings.policy.name)
        with open_asking(settings, leave) as asking:
            places, unknown = find_places(asking, statement, (names[TRAJECTORIES], names[EVALUATIONS]))
        selection = selector.by_places(places, rule)
        selection.left_out[UNKNOWN] += unknown
        return selection

    return ask


def one(sql: str) -> str:
    """The one query of a text. Raises QuestionError."""
    statement, rest = split(sql)
    statements = [*statement, *([rest] if rest else [])]
    if len(statements) != 1:
        raise QuestionError(f"a selection is one query, and here are {len(statements)}")
    return statements[0]


def find_places(asking: Asking, sql: str, topics: Sequence[str]) -> tuple[list[Place], int]:
    """Places in the order of the rows, and how many ids have none. topics: where ids are looked up. Raises
    QuestionError for a query that gives neither places nor ids, QueryError for one that the engine refuses."""
    try:
        rows = asking.table(sql)
    except pa.ArrowInvalid:
        raise QuestionError("the answer cannot be read as rows: leave FORMAT out of the query") from None
    if not rows.num_rows:
        return [], 0
    if set(PLACE) <= {*rows.column_names}:
        return list(_places(rows)), 0
    column = next((name for name in IDS if name in rows.column_names), None)
    if column is None:
        raise QuestionError(
            f"the query gives {', '.join(rows.column_names)}, and nothing says where the trajectories lie: "
            "select topic, part and off, or trajectory, as the views trajectories and samples have them"
        )
    names = dict.fromkeys(_text(value, number, column) for number, value in enumerate(rows[column].to_pylist(), 1))
    there = _looked_up(asking, [*names], topics)
    return [place for name in names for place in there.get(name, [])], sum(name not in there for name in names)


def _looked_up(asking: Asking, ids: Sequence[str], topics: Sequence[str]) -> dict[str, list[Place]]:
    out: dict[str, list[Place]] = {}
    for first in range(0, len(ids), AT_ONCE):
        rows = asking.table(LOOK, {"topics": [*topics], "ids": ids[first : first + AT_ONCE]})
        for name, place in zip(rows["trajectory"].to_pylist() if rows.num_rows else [], _places(rows), strict=True):
            out.setdefault(name, []).append(place)
    return out


def _places(rows: pa.Table) -> Iterator[Place]:
    """A place a row. Raises QuestionError naming the row that is none."""
    if not rows.num_rows:
        return
    for number, values in enumerate(zip(*(rows[name].to_pylist() for name in PLACE), strict=True), 1):
        match values:
            case str() as topic, int() as part, int() as off if not (isinstance(part, bool) or isinstance(off, bool)):
                yield Place(topic, part, off)
            case _:
                raise QuestionError(
                    f"row {number} of the answer is no place: topic, part and off are {_values_text(values)}; leave "
                    "such rows out, for instance with WHERE topic != ''"
                )


def _text(value: Any, number: int, column: str) -> str:
    if not isinstance(value, str):
        raise QuestionError(f"row {number} of the answer has the {column} {_values_text([value])}, which is no id")
    return value


def _values_text(values: Sequence[Any]) -> str:
    return ", ".join("NULL" if value is None else repr(value)[:60] for value in values)
