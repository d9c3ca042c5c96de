"""`millrace sql`: one query, a file of them, or a prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.text import Text

from millrace.apps.cli.context import call, complain, console
from millrace.apps.cli.selecting import query as query_of
from millrace.infra import durable
from millrace.infra.errors import ConfigError, WarehouseError
from millrace.infra.terminal import RowTable, put_bytes

if TYPE_CHECKING:
    from millrace.consumers.warehouse.client import Asking
    from millrace.infra.config import Settings

MAX_ROWS = 1000
"""rows of a table on a terminal"""
AS_STRINGS = "JSONCompactStringsEachRowWithNamesAndTypes"
NULL = "ᴺᵁᴸᴸ"
"""as the engine writes it in AS_STRINGS"""
NUMBERS = ("UInt", "Int", "Float", "Decimal", "Nullable(UInt", "Nullable(Int", "Nullable(Float", "Nullable(Decimal")


class AnswerFormat(StrEnum):
    """How an answer is written."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"
    PARQUET = "parquet"


FORMATS = {
    AnswerFormat.CSV: "CSVWithNames",
    AnswerFormat.JSON: "JSONEachRow",
    AnswerFormat.JSONL: "JSONEachRow",
    AnswerFormat.PARQUET: "Parquet",
}
SETTINGS = {
    AnswerFormat.JSON: {"output_format_json_array_of_rows": "1", "output_format_json_quote_64bit_integers": "0"},
    AnswerFormat.JSONL: {"output_format_json_quote_64bit_integers": "0"},
}


def sql(
    context: typer.Context,
    query: Annotated[
        str | None,
        typer.Argument(
            help="the query; a file ending with .sql; - or nothing for standard input; on a terminal a prompt",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        AnswerFormat | None,
        typer.Option("--format", "-f", help="default: by the name of -o, else table", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="file to write", dir_okay=False, show_default=False)
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", metavar="NAME=VALUE", help="value of {name:Type} in the query; may be repeated"),
    ] = None,
) -> None:
    """Ask the warehouse in SQL (ClickHouse's), read-only.

    `millrace sql "SELECT version, count() FROM samples GROUP BY version ORDER BY version"`; SHOW TABLES lists the
    tables, DESCRIBE NAME says what its columns are. It asks the warehouse that runs, or opens its directory where none
    runs. Limits of a query: query_seconds, query_memory_mb and query_rows in the settings of the warehouse."""
    from millrace.consumers.warehouse.client import leave, open_asking
    from millrace.consumers.warehouse.statements import split

    settings = call(context).settings()
    answer_form, arguments = form_of(form, out), values(params or [])
    with open_asking(settings, leave) as asking:
        text = _text(query)
        if text is None:
            prompt(asking, settings, arguments)
            return
        queries, rest = split(text)
        statements = [*queries, *([rest] if rest else [])]
        if not statements:
            raise ConfigError('there is no query: `millrace sql "SELECT 1"`, or `millrace sql FILE.sql`')
        if out is not None and len(statements) > 1:
            raise ConfigError(f"-o takes the answer of one query, and here are {len(statements)}")
        for statement in statements:
            answer(asking, statement, answer_form, out, arguments)


def answer(asking: Asking, statement: str, form: AnswerFormat, out: Path | None, params: dict[str, str]) -> None:
    """One answer on standard output or in a file, which is there only when it is whole. Raises WarehouseError."""
    if form is AnswerFormat.TABLE:
        settings = {"max_result_rows": str(MAX_ROWS + 1), "result_overflow_mode": "break"}
        rows, more = table(asking.ask(statement, AS_STRINGS, params, settings))
        console.print(rows)
        if rows.columns and not rows.row_count:
            complain.print("the answer has no rows", style="dim", highlight=False)
        if more:
            note = f"these are the first {MAX_ROWS:,} rows: LIMIT asks for fewer, -o FILE writes all of them"
            complain.print(note, style="dim", highlight=False, soft_wrap=True)
        return
    pieces = asking.ask(statement, FORMATS[form], params, SETTINGS.get(form, {}))
    if out is None:
        put_bytes(pieces, as_json=form in (AnswerFormat.JSON, AnswerFormat.JSONL))
        return
    with durable.drafting(out, replace=True, sync=False) as draft, draft.open("wb") as file:
        file.writelines(pieces)
    console.print(f"wrote {out}", highlight=False, soft_wrap=True)


def table(pieces: Iterator[bytes]) -> tuple[RowTable, bool]:
    """Rows for people, at most MAX_ROWS, and whether there are more. pieces: lines of JSON: names, types, rows."""
    lines = b"".join(pieces).split(b"\n")[:-1]
    if len(lines) < 2:
        return RowTable(box=None), False  # EXPLAIN and the like of nothing
    names, types = orjson.loads(lines[0]), orjson.loads(lines[1])
    rows = RowTable(box=None, pad_edge=False)
    for name, kind in zip(names, types, strict=True):
        number = kind.startswith(NUMBERS)
        rows.add_column(Text(name), justify="right" if number else "left", overflow="fold")
    for line in lines[2 : 2 + MAX_ROWS]:
        cells = zip(orjson.loads(line), types, strict=True)
        rows.add_row(*(Text("NULL" if cell is None else cell_text(str(cell), kind)) for cell, kind in cells))
    return rows, len(lines) - 2 > MAX_ROWS


def cell_text(cell: str, kind: str) -> str:
    """A value for a reader: of a float, the six digits that matter. Pure."""
    if cell == NULL:
        return "NULL"
    return f"{float(cell):.6g}" if kind.removeprefix("Nullable(").startswith("Float") else cell


def prompt(asking: Asking, settings: Settings, params: dict[str, str]) -> None:
    """Queries one after another, each ended by a semicolon, until ^D. What was asked is kept in a private file."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory

    from millrace.consumers.warehouse.statements import split
    from millrace.infra.local_keys import make_home

    make_home(settings.home)
    session: PromptSession[str] = PromptSession(history=FileHistory(str(settings.home / "sql_history")))
    console.print("a query ends with ; SHOW TABLES; lists the tables; ^D ends", style="dim")
    text = ""
    while True:
        try:
            text += session.prompt("... " if text else "sql> ") + "\n"
        except KeyboardInterrupt:
            text = ""
            continue
        except EOFError:
            return
        queries, rest = split(text)
        text = f"{rest}\n" if rest else ""
        for statement in queries:
            if statement.lower() in ("exit", "quit"):
                return
            try:
                answer(asking, statement, AnswerFormat.TABLE, None, params)
            except WarehouseError as error:
                complain.print(Text(f"error: {error}", "red"), soft_wrap=True)


def form_of(form: AnswerFormat | None, out: Path | None) -> AnswerFormat:
    """What is written: as asked, else by the file's name. Raises ConfigError where neither says it, or for a table in a
    file. Pure."""
    suffix = out.suffix.removeprefix(".").lower() if out else ""
    suffix = {"ndjson": "jsonl", "pq": "parquet"}.get(suffix, suffix)
    answer_form = form or next((one for one in AnswerFormat if one.value == suffix), None)
    if answer_form is None and out is None:
        return AnswerFormat.TABLE
    if answer_form is None or (answer_form is AnswerFormat.TABLE and out is not None):
        raise ConfigError("-o FILE needs --format csv, json, jsonl or parquet, or a name that ends with one of them")
    if answer_form is AnswerFormat.PARQUET and out is None and sys.stdout.isatty():
        raise ConfigError("Parquet is for files: add -o FILE.parquet")
    return answer_form


def values(pairs: list[str]) -> dict[str, str]:
    """`name=value` pairs. Raises ConfigError for one without an equals sign. Pure."""
    out = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--param {pair}: write it as name=value")
        out[name] = value
    return out


def _text(query: str | None) -> str | None:
    """The text of queries; None for a prompt."""
    if query is None and sys.stdin.isatty():
        return None
    if query is None or query == "-":
        return sys.stdin.read()
    return query_of(query)
