"""The words of a statement in the engine's own canonical spelling (`formatQuerySingleLine`): no comments, keywords in
capitals, strings in single quotes, odd names in backticks. Pure.

The tree that `EXPLAIN AST` prints does not name everything (`* APPLY file` shows no `file`), so the words are looked at
as well. Invariant: a call `name(...)` anywhere in the text is found here, and so is a name that stands alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"(?P<string>'(?:[^'\\]|\\.|'')*')"
    r"|(?P<quoted>`(?:[^`\\]|\\.|``)*`|\"(?:[^\"\\]|\\.|\"\")*\")"
    r"|(?P<parameter>\{[^{}'`\"]*\})"
    r"|(?P<number>\d[\w.]*(?:[eE][+-]?\d+)?)"
    r"|(?P<word>[^\W\d]\w*)"
    r"|(?P<space>\s+)"
    r"|(?P<sign>.)",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)|``|\"\"", re.DOTALL)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}


@dataclass(frozen=True, slots=True)
class Word:
    """A name or keyword. `is_bare`: not in backticks; `member`: a part after a dot; `holds`: a dot follows;
    `is_called`: a parenthesis follows."""

    text: str
    is_bare: bool
    member: bool
    holds: bool
    is_called: bool


def words(canonical: str) -> list[Word]:
    """Every name and keyword, in order."""
    tokens = list(_tokens(canonical))
    out = []
    for at, (kind, text) in enumerate(tokens):
        if kind in ("word", "quoted"):
            last = tokens[at - 1][1] if at else ""
            following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
            name = text if kind == "word" else _unquote(text)
            out.append(Word(name, kind == "word", last == ".", following == ".", following == "("))
    return out


def paths(canonical: str) -> list[tuple[str, ...]]:
    """Every name with dots, as its parts."""
    out: list[tuple[str, ...]] = []
    parts: list[str] = []
    for word in words(canonical):
        parts = [*parts, word.text] if word.member else [word.text]
        if len(parts) > 1 and not word.holds:
            out.append(tuple(parts))
    return out


def identifiers(canonical: str) -> list[str]:
    """Names of the parameters that stand for a name of a table, column or database."""
    inside = (text[1:-1].partition(":") for kind, text in _tokens(canonical) if kind == "parameter")
    return [name.strip() for name, _, type_ in inside if type_.strip().lower() == "identifier"]


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind != "space":
            yield kind, match[0]


def _unquote(name: str) -> str:
    return _ESCAPE.sub(lambda match: _CONTROL.get(match[1], match[1]) if match[1] else match[0][0], name[1:-1])


def literal(text: str) -> str:
    """`text` as a string literal of ClickHouse."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\0", "\\0") + "'"


def identifier(name: str) -> str:
    """`name` in backticks."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"
