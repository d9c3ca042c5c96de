"""Nothing that stands in the log can steer a terminal, whichever command prints it, text or data."""

from __future__ import annotations

import ast
import io
import json
import logging
import math
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree

from millrace.infra.terminal import CleanFormatter, RowTable, Terminal, clean, escape_json, put, put_bytes, put_json
from tests.support.house import ROOMS

ROOT = Path(__file__).parents[2]
STEERING = "\x1b]52;c;aGk=\x07\x1b]0;mine\x1b\\\x9b31m\x85\x7f\r\x08\u202e\u2066\u2028\x00"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def printed(*things: Any, colour: bool = False, **how: Any) -> str:
    out = io.StringIO()
    terminal = Terminal(file=out, width=200, force_terminal=colour, no_color=not colour)
    for thing in things:
        terminal.print(thing, **how)
    return out.getvalue()


def table(text: str) -> Table:
    made = Table("name", text, title=text)
    made.add_row(text, Text(text, style="red"))
    return made


@given(st.text(max_size=50).map(lambda text: text + STEERING))
def test_whatever_is_printed_is_printed_without_control_characters(text: str) -> None:
    tree = Tree(Text(text))
    tree.add(Group(Text(text), Panel(Text(text), title=Text(text))))
    for markup in (True, False):
        shown = printed(Text(text), table(text.replace("[", "(")), tree, text.replace("[", "("), markup=markup)
        assert not OBEYED.search(shown)


def test_colours_stay() -> None:
    shown = printed(Text(f"x{STEERING}", style="red"), colour=True)
    assert COLOUR.search(shown)
    assert not OBEYED.search(COLOUR.sub("", shown))


def test_a_live_display_moves_its_cursor_and_prints_no_other_control() -> None:
    out = io.StringIO()
    terminal = Terminal(file=out, width=80, force_terminal=True)
    with Live(table(STEERING), console=terminal, auto_refresh=False) as live:
        live.update(table(STEERING), refresh=True)
    shown = re.sub(r"\x1b\[\??[0-9;]*[A-Za-z]|\r", "", out.getvalue())
    assert not OBEYED.search(shown)


def test_text_without_such_characters_stays_as_it_is() -> None:
    text = "a plain line\n\twith tabs, umlauts äöü, 漢字 and 🙂"
    assert clean(text) == text
    assert clean("\x1b[2J") == "␛[2J"


def test_log_lines_are_clean_and_keep_their_lines() -> None:
    try:
        raise ValueError(STEERING)
    except ValueError as error:
        found = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.INFO, "f", 1, "task %s", (STEERING,), found)
    line = CleanFormatter("%(message)s").format(record)
    assert not OBEYED.search(line)
    assert line.count("\n") > 1


class Screen(io.TextIOWrapper):
    """Standard output that is, or is not, a terminal."""

    def __init__(self, *, shows: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="")
        self.shows = shows

    def isatty(self) -> bool:
        return self.shows

    def got(self) -> bytes:
        self.flush()
        return cast(io.BytesIO, self.buffer).getvalue()


@pytest.mark.parametrize("shows", [True, False])
def test_data_is_clean_on_a_terminal_and_as_it_is_in_a_pipe(monkeypatch: pytest.MonkeyPatch, *, shows: bool) -> None:
    screen = Screen(shows=shows)
    monkeypatch.setattr(sys, "stdout", screen)
    put(STEERING)
    data = f"a,{STEERING},漢".encode()
    put_bytes([data[at : at + 1] for at in range(len(data))])
    if shows:
        assert not OBEYED.search(screen.got().decode())
        assert screen.got().decode().endswith("漢")
    else:
        assert screen.got() == f"{STEERING}\n".encode() + data


@pytest.mark.parametrize("shows", [True, False])
def test_json_is_clean_and_the_same_json(monkeypatch: pytest.MonkeyPatch, *, shows: bool) -> None:
    screen = Screen(shows=shows)
    monkeypatch.setattr(sys, "stdout", screen)
    value = {STEERING: ["漢", STEERING]}
    put_json(value)
    assert not OBEYED.search(screen.got().decode())
    before = len(screen.got())
    put_bytes([json.dumps(value, ensure_ascii=False).encode()], as_json=True)
    said = screen.got()[before:].decode()
    assert shows != bool(OBEYED.search(said))
    assert json.loads(screen.got()[:before]) == json.loads(said) == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_what_is_printed_is_json_whatever_the_numbers_are(value: Any) -> None:
    """Strict readers know no NaN and no infinity, so they are null; all else is what it was."""

    def never(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    def same(part: Any) -> Any:
        if isinstance(part, float) and not math.isfinite(part):
            return None
        if isinstance(part, dict):
            return {key: same(inner) for key, inner in part.items()}
        return [same(inner) for inner in part] if isinstance(part, list | tuple) else part

    out = io.StringIO()
    with redirect_stdout(out):
        put_json(value)
    assert json.loads(out.getvalue(), parse_constant=never) == same(value)


@given(st.text().map(lambda text: text + STEERING))
def test_escapes_change_no_value(text: str) -> None:
    made = escape_json(json.dumps(text, ensure_ascii=False))
    assert not OBEYED.search(made)
    assert json.loads(made) == text


BUILDING = {"infra/machine/jars.py", "infra/machine/make_class_archive.py"}
"""run while a tree is set up, before there is a log; they print paths"""
CLEANED = {"producers/intake/run.py": "os.write"}
"""who writes past Python's buffers, since its process is about to become another; what it writes is cleaned there"""


@pytest.mark.parametrize("room", sorted(set(ROOMS) - {"schemas"}))
def test_there_is_no_other_way_to_a_terminal(room: str) -> None:
    """Whoever prints what is in the log does so through `Terminal` (its tables are `RowTable`s), `put`, `put_json`,
    `put_bytes` or a logger."""
    for path in (ROOT / room).rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name != "infra/terminal.py" and name not in BUILDING:
            assert set(ways(path.read_text())) <= {CLEANED.get(name)}, f"{name}: go through millrace.infra.terminal"


@pytest.mark.parametrize(
    "code",
    [
        "Console()",
        "print(x)",
        "typer.echo(x)",
        "click.secho(x)",
        "sys.stdout.write(x)",
        "sys.stdout.buffer.write(x)",
        "sys.stderr.buffer.writelines(x)",
        "os.write(2, x)",
        "out = sys.stdout.buffer",
        "logging.basicConfig(level=1)",
        "logging.StreamHandler().setFormatter(logging.Formatter())",
        "rich.print(x)",
        "Table(box=None)",
    ],
)
def test_another_way_is_found(code: str) -> None:
    assert list(ways(code))


def ways(code: str) -> Iterator[str]:
    """What in this code writes to a terminal past `Terminal`, `RowTable` and `put`."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        text = ast.unparse(node)
        if isinstance(node, ast.Attribute) and re.fullmatch(r"sys\.(stdout|stderr)\.(buffer|write|writelines)", text):
            yield text
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("Console", "print", "rich.print") or re.fullmatch(r"(typer|click)\.s?echo", called):
                yield called
            if called in ("Table", "rich.table.Table"):
                yield called
            if called == "os.write" and isinstance(node.args[0], ast.Constant):
                yield called
            if called == "logging.basicConfig" and "handlers" not in [one.arg for one in node.keywords]:
                yield called
            if called == "logging.StreamHandler" and "CleanFormatter(" not in code:
                yield called


CELL = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp", "Mn", "Me", "Cf"]), max_size=300
)
BROKEN = st.lists(CELL, min_size=1, max_size=3).map("\n".join)
"""the same with line breaks"""
ROWS = st.integers(1, 6).flatmap(lambda width: st.lists(st.lists(CELL, min_size=width, max_size=width), min_size=1))


@given(ROWS, st.sampled_from(["fold", "ellipsis", "crop"]), st.booleans())
def test_what_is_no_terminal_gets_every_value_whole_on_one_line(rows: list[list[str]], cut: Any, fixed: bool) -> None:
    made = Table(box=None, pad_edge=False)
    for name in rows[0]:
        made.add_column(Text(name), no_wrap=fixed, overflow=cut)
    for row in rows[1:]:
        made.add_row(*map(Text, row))
    tree = Tree(Text("root"))
    tree.add(made)
    for thing in (made, Group("", made), tree):
        out = io.StringIO()
        Terminal(file=out).print(thing)
        lines = out.getvalue().split("\n")[:-1]
        drawn = lines[len(lines) - len(rows) :]
        assert all(cell.rstrip() in line for row, line in zip(rows, drawn, strict=True) for cell in row)
        assert len(lines) == len(rows) + (thing is not made)


@given(st.lists(st.lists(BROKEN, min_size=2, max_size=2), min_size=1), st.sampled_from(["fold", "ellipsis", "crop"]))
def test_a_row_of_texts_is_one_line_where_no_terminal_shows_it(rows: list[list[str]], cut: Any) -> None:
    made, shown = RowTable(box=None, pad_edge=False), RowTable(Column("head"), "more", box=None)
    for name in rows[0]:
        made.add_column(Text(name), overflow=cut)
    for first, second in rows[1:]:
        made.add_row(Text(first, "red"), Text(second))
        shown.add_row(first.replace("[", "("), None)
    for thing in (made, Group("", made)):
        out = io.StringIO()
        Terminal(file=out).print(thing, shown)
        lines = out.getvalue().split("\n")
        drawn = lines[thing is not made :][: len(rows)]
        assert all(
            cell.replace("\n", "\\n").rstrip() in line for row, line in zip(rows, drawn, strict=True) for cell in row
        )
        assert len(lines) == 2 * len(rows) + 1 + (thing is not made)
    screen = io.StringIO()
    Terminal(file=screen, width=2000, force_terminal=True, no_color=True).print(shown)
    assert screen.getvalue().count("\n") == 1 + sum(first.count("\n") + 1 for first, _ in rows[1:])


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS", "CLICOLOR_FORCE", "COLUMNS"])
def test_no_variable_makes_a_terminal_of_a_pipe(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    out = io.StringIO()
    terminal = Terminal(file=out)
    terminal.print(Text("so on and " * 50, style="red"), markup=False)
    with Live(table("x"), console=terminal, auto_refresh=False):
        pass
    assert not terminal.is_terminal
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().startswith("so on and " * 50)


@given(CELL)
def test_what_is_no_terminal_gets_sentences_on_one_line(text: str) -> None:
    out = io.StringIO()
    Terminal(file=out).print(Text(f"{text} and so on" * 20))
    assert out.getvalue().count("\n") == 1
