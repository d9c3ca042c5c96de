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
    """A name or keyword. `bare`: not in backticks; `member`: a part after a dot; `holds`: a dot follows; `called`: a
    parenthesis follows."""

    text: str
    bare: bool
    member: bool
    holds: bool
    called: bool


def words(canonical: str) -> list[Word]:
    """Every name and keyword, in order."""
    found = list(_tokens(canonical))
    out = []
    for at, (kind, text) in enumerate(found):
        if kind in ("word", "quoted"):
            last = found[at - 1][1] if at else ""
            following = found[at + 1][1] if at + 1 < len(found) else ""
            name = text if kind == "word" else _plain(text)
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
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup or ""
        if kind != "space":
            yield kind, found[0]


def _plain(quoted: str) -> str:
    return _ESCAPE.sub(lambda found: _CONTROL.get(found[1], found[1]) if found[1] else found[0][0], quoted[1:-1])


def literal(text: str) -> str:
    """`text` as a string literal of ClickHouse."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\0", "\\0") + "'"


def identifier(name: str) -> str:
    """`name` in backticks."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"
