"""The files of views and questions explain themselves, and a file that does not is refused."""

from __future__ import annotations

import re

import pytest

from millrace.consumers.warehouse.questions import catalog, views
from millrace.consumers.warehouse.questions.headers import parse, read
from millrace.infra.errors import QuestionError

FILE = """-- What it is.
--
-- More: with a colon,
-- over two lines.
--
-- version UInt64 = 0: which version
--     of all
-- name: a name
SELECT 1 -- not a comment of the header
"""


def test_a_file_in_its_parts() -> None:
    file = parse("x", FILE)
    assert (file.doc, file.more) == ("What it is.", "More: with a colon, over two lines.")
    assert file.names == {"version UInt64 = 0": "which version of all", "name": "a name"}
    assert file.sql == "SELECT 1 -- not a comment of the header"
    assert parse("x", "-- Only this.\nSELECT 1").names == {}


@pytest.mark.parametrize("text", ["SELECT 1", "-- no sentence\nSELECT 1", ""])
def test_a_file_without_a_sentence_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"x\.sql must begin"):
        parse("x", text)


def test_every_view_of_the_issue_is_there() -> None:
    wanted = "trajectories steps model_calls tool_calls rewards samples versions trained groups evaluations"
    wanted += " dead_letters costs staleness waits principals"
    assert {view.name for view in views.views()} == set(wanted.split())


@pytest.mark.parametrize("folder", ["views", "asked"])
def test_every_file_is_plain_sql(folder: str) -> None:
    for name, file in read(folder).items():
        assert file.sql.startswith(("SELECT", "WITH")), name
        assert ";" not in file.sql, name
        assert all(len(line) <= 120 for line in file.sql.splitlines()), name
        assert all(re.fullmatch(r"[^\s].*[^.\s]", told) for told in file.names.values()), name


def test_a_view_that_documents_other_columns_than_it_has_is_refused() -> None:
    view = parse("x", "-- It is.\n--\n-- a: first\n-- b: second\nSELECT 1 AS a, 2 AS b")
    made = views.creation(view, {"a": "UInt8", "b": "UInt8"})
    assert made.startswith("CREATE OR REPLACE VIEW `x` (\n  `a` UInt8 COMMENT 'first',")
    for types in ({"a": "UInt8"}, {"b": "UInt8", "a": "UInt8"}, {"a": "UInt8", "b": "UInt8", "c": "UInt8"}):
        with pytest.raises(ValueError, match="documents other columns"):
            views.creation(view, types)


def test_the_parameters_of_a_question() -> None:
    policy, version = catalog.questions()["trained-by"].parameters
    assert (policy.name, policy.type, policy.default, policy.is_integer) == ("policy", "String", None, False)
    assert (version.flag, version.is_integer) == ("--version", True)
    days = catalog.questions()["costs-by-tenant"].parameters[2]
    assert (days.name, days.default) == ("days", "0")


def test_a_question_that_uses_what_it_does_not_document_is_refused() -> None:
    for sql in ("SELECT {a:String}, {b:String}", "SELECT 1", "SELECT {a:UInt8}"):
        with pytest.raises(ValueError, match="other parameters than it documents"):
            catalog._question("x", "It is.", "", {"a String": "what"}, sql)


def test_values_are_checked_before_anything_is_asked() -> None:
    trained, costs = catalog.questions()["trained-by"], catalog.questions()["costs-by-tenant"]
    assert catalog.values(costs, {"tenant": "it's"}) == {"policy": "", "tenant": "it's", "days": "0"}
    assert catalog.values(trained, {"policy": "p", "version": "7"}) == {"policy": "p", "version": "7"}
    with pytest.raises(QuestionError, match=r"trained-by needs --version: which version"):
        catalog.values(trained, {"policy": "p"})
    for bad in ("-1", "1.5", "x", "", "1" * 19, "1 OR 1", "\u0661"):
        with pytest.raises(QuestionError, match="--version is a whole number"):
            catalog.values(trained, {"policy": "p", "version": bad})
    with pytest.raises(QuestionError, match=r"takes no nothing; its parameters: --policy, --tenant, --days"):
        catalog.values(costs, {"nothing": "1"})
