"""Nothing that stands in the log can steer a terminal, whichever command prints it."""

from __future__ import annotations

import ast
import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from millrace.infra.terminal import CleanFormatter, Terminal, clean

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


@pytest.mark.parametrize("room", ["infra", "consumers", "producers", "streams", "trainers"])
def test_there_is_no_other_console(room: str) -> None:
    """Whoever prints what is in the log does so through `Terminal`."""
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "Console", f"{path}: use millrace.infra.terminal.Terminal"
