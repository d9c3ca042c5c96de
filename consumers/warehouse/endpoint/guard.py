"""Whether a reader may run a text. Pure but for what the engine says of the text; nothing is run here.

    text -> canonical spelling -> class of the statement -> words -> tree -> Statement

Invariants: what is run is the canonical text that was looked at, never the text that came; a text is one statement that
reads, calls allowed functions alone, reads allowed tables alone and sets nothing; whatever is not known is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol

from millrace.consumers.warehouse.endpoint import permissions
from millrace.consumers.warehouse.endpoint.faults import (
    ACCESS_DENIED,
    BAD_ARGUMENTS,
    READONLY,
    SYNTAX_ERROR,
    UNKNOWN_FORMAT,
    QueryError,
)
from millrace.consumers.warehouse.endpoint.words import Word, identifiers, literal, paths, words

_FORMAT = re.compile(r" FORMAT (\w+)$")
_IN = re.compile(r"(global)?(not)?(null)?in(ignoreset)?", re.IGNORECASE)
_CLAUSES = ("SETTINGS", "OUTFILE", "INFILE")
_BEFORE_PARENTHESES = re.compile(
    r"IN|AS|ON|USING|OVER|AND|OR|NOT|SELECT|FROM|WHERE|PREWHERE|HAVING|QUALIFY|BY|WITH|THEN|ELSE|WHEN|CASE|BETWEEN|I?LIKE"
    r"|JOIN|UNION|ALL|DISTINCT|EXCEPT|INTERSECT|INTERVAL|LIMIT|OFFSET|SETS|ROLLUP|CUBE|TABLE|EXPLAIN|AST|PIPELINE"
    r"|PLAN|SYNTAX|TREE|ESTIMATE|ANY|ANTI|SEMI|ASOF|COLUMNS|REPLACE|APPLY|IS|FILTER|RANGE|ROWS|MATERIALIZED|DESCRIBE"
    r"|EXISTS|SAMPLE|TO|STEP|FILL|INTERPOLATE|GLOBAL"
)
"""keywords that a parenthesis may follow without a call; `EXISTS`, `NOT` and the like are functions too, all allowed"""


class Statement(NamedTuple):
    """A text that may be run. sql: canonical, without its FORMAT; form: the format it names, empty where it names none;
    streams: whether the engine can give its answer in pieces."""

    sql: str
    form: str
    streams: bool


class TextEngine(Protocol):
    """What is asked of an engine about a text."""

    def text(self, sql: str, params: dict[str, str] | None = None) -> str:
        """The only column of an answer, a row a line. Raises QueryError."""

    def classify(self, sql: str) -> tuple[str, int] | None:
        """What the engine takes a text for, and how many statements it is; None for one that does not say: it takes
        one statement at a time."""


@dataclass(frozen=True, slots=True)
class Functions:
    """What the engine can call. categories: by lower-case name; combinators: endings of aggregate functions."""

    categories: Mapping[str, str]
    combinators: tuple[str, ...]

    @staticmethod
    def of(engine: TextEngine) -> Functions:
        """Those of this engine."""
        sql = (
            "SELECT concat(f.name, '\t', if(f.alias_to != '', t.categories, f.categories), '\t', f.alias_to, '\t',"
            " toString(f.is_aggregate)) FROM system.functions AS f"
            " LEFT JOIN system.functions AS t ON t.name = f.alias_to WHERE f.origin = 'System'"
        )
        categories: dict[str, str] = {}
        for line in engine.text(sql).splitlines():
            name, category, target, aggregate = line.split("\t")
            kind = "Aggregate Functions" if aggregate == "1" else category
            if (target or name).lower() in permissions.FUNCTIONS:
                kind = "named"
            categories[name.lower()] = kind
        combinators = engine.text("SELECT name FROM system.aggregate_function_combinators").split()
        return Functions(categories, tuple(one.lower() for one in combinators))

    def allows(self, name: str) -> bool:
        """Whether a reader may call it."""
        name = name.lower()
        if name in permissions.FORMATTERS:
            return False
        if name in permissions.FUNCTIONS:
            return True
        if name in self.categories:
            return self.categories[name] == "named" or self.categories[name] in permissions.CATEGORIES
        return any(self._aggregate(name[: -len(end)]) for end in self.combinators if name.endswith(end))

    def _aggregate(self, name: str) -> bool:
        return self.categories.get(name) == "Aggregate Functions" or any(
            self._aggregate(name[: -len(end)]) for end in self.combinators if name.endswith(end)
        )

    def refuses(self, name: str) -> bool:
        """Whether it is a function of the engine that a reader may not call."""
        return name.lower() in self.categories and not self.allows(name)


class Guard:
    """The rules for one engine. May be shared by threads."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    def admit(self, engine: TextEngine, text: str, params: Mapping[str, str]) -> Statement:
        """The statement to run. `engine` holds nothing of a reader's query, such as a setting. Raises QueryError."""
        spelling = canonical(engine, text)
        kind, count = engine.classify(spelling) or ("READ_ONLY", 1)
        if count != 1:
            raise QueryError("one statement at a time: send each in a request of its own.", SYNTAX_ERROR)
        if kind != "READ_ONLY":
            raise QueryError(
                "the warehouse is read-only here: SELECT, EXPLAIN, DESCRIBE, SHOW and EXISTS are served.", READONLY
            )
        form = match[1] if (match := _FORMAT.search(spelling)) else ""
        check_format(form)
        sql = _FORMAT.sub("", spelling)
        self._check_words(words(sql))
        self._check_paths(paths(sql))
        self._check_names(identifiers(sql), params)
        head = self._check_tree(engine.text(f"EXPLAIN AST {sql}", dict(params)).split("\n"))
        return Statement(sql, form, streams=head == "SelectWithUnionQuery")

    def _check_words(self, words: Iterable[Word]) -> None:
        for word in words:
            if word.is_bare and word.text in _CLAUSES:
                raise QueryError(
                    f"{word.text} is not served in a query: settings that shape an answer go in the URL.",
                    READONLY,
                )
            if word.member:
                continue
            keyword = word.is_bare and _BEFORE_PARENTHESES.fullmatch(word.text) is not None
            name = word.text
            if word.is_called:
                if not keyword and not self._functions.allows(name) and name.lower() not in permissions.TABLE_FUNCTIONS:
                    raise self._refusal(name)
            elif not word.holds and self._functions.refuses(name):
                raise QueryError(
                    f"`{name}` could be the function of that name, which is not served: write table.{name} for a "
                    "column, and choose another alias.",
                    ACCESS_DENIED,
                )

    def _check_paths(self, paths: Iterable[tuple[str, ...]]) -> None:
        for path in paths:
            if path[0] == "system" and path[1] not in permissions.SYSTEM:
                raise QueryError(f"table system.{path[1]} is not served here.", ACCESS_DENIED)

    def _check_names(self, names: Iterable[str], params: Mapping[str, str]) -> None:
        for name in names:
            value = params.get(name, "")
            if not value.isidentifier() or value == "system" or self._functions.refuses(value):
                raise QueryError(f"parameter {name} may not be {value!r}: write the name in the query.", ACCESS_DENIED)

    def _check_tree(self, lines: list[str]) -> str:
        """Raises QueryError unless every table is allowed; gives the kind of the outermost node."""
        head, _, kind = lines[0].partition(" (")[0].partition(" ")
        if head not in permissions.STATEMENTS or (head == "Explain" and kind not in permissions.EXPLAINS):
            raise QueryError(
                f"{kind if head == 'Explain' else head} is not served, the warehouse is read-only here: ask with "
                "SELECT, EXPLAIN, DESCRIBE, SHOW TABLES, SHOW COLUMNS, SHOW CREATE or EXISTS.",
                READONLY,
            )
        if head in permissions.NAMING:
            self._check_subject(head, [line[1:] for line in lines[1:] if line.startswith(" Identifier ")])
        above = ""
        for at, line in enumerate(map(str.lstrip, lines)):
            kind, _, rest = line.partition(" ")
            name = rest.partition(" (")[0]
            if kind.endswith("Query") and kind not in permissions.INSIDE:  # what EXPLAIN explains
                raise QueryError(f"{kind} is not served, nor explained: the warehouse is read-only here.", READONLY)
            if kind == "TableIdentifier":
                self._check_table(name)
            if (
                kind == "Function"
                and above.startswith("TableExpression")
                and name.lower() not in permissions.TABLE_FUNCTIONS
            ):
                raise self._refusal(name)
            if kind == "Function" and _IN.fullmatch(name):
                self._check_set(lines[at:])
            above = line
        return head

    def _check_subject(self, head: str, identifiers: list[str]) -> None:
        """The names of a statement that is about one thing: its database, its table, or both."""
        *database, name = [line.partition(" ")[2] for line in identifiers] or [""]
        if not database and name and head in permissions.OF_DATABASES:
            if name != "system" and name not in permissions.DATABASES | permissions.CATALOGUES:
                raise QueryError(f"database {name} is not served here.", ACCESS_DENIED)
        else:
            self._check_table(".".join([*database, name]))

    def _check_set(self, lines: list[str]) -> None:
        """What IN looks in, the last argument of the function on the first line, may be the name of a table."""
        deep = len(lines[0]) - len(lines[0].lstrip()) + 2
        inside = takewhile(lambda line: len(line) - len(line.lstrip()) >= deep, lines[2:])
        arguments = [line[deep:] for line in inside if not line[deep:].startswith(" ")]
        if arguments and arguments[-1].startswith("Identifier "):
            self._check_table(arguments[-1].partition(" ")[2].partition(" (")[0])

    def _check_table(self, name: str) -> None:
        database, dot, table = name.partition(".")
        if not dot or database in permissions.DATABASES or database in permissions.CATALOGUES:
            return
        if database == "system" and table in permissions.SYSTEM:
            return
        raise QueryError(f"table {name} is not served here.", ACCESS_DENIED)

    def _refusal(self, name: str) -> QueryError:
        is_known = name.lower() in self._functions.categories
        reason = "is not served: it could reach beyond the tables" if is_known else "is no function that is served here"
        return QueryError(f"{name}() {reason}.", ACCESS_DENIED)


def canonical(engine: TextEngine, text: str) -> str:
    """The engine's own spelling of one statement. Raises QueryError for what it cannot parse."""
    text = text.strip().rstrip(";").strip()
    if not text:
        raise QueryError("there is no query: send one in the body or as `query`.", SYNTAX_ERROR)
    if "\0" in text:
        raise QueryError("a query holds no NUL.", SYNTAX_ERROR)
    return engine.text(f"SELECT formatQuerySingleLine({literal(text)})").removesuffix("\n")


def check_format(form: str) -> None:
    """Raises QueryError for a format that reads files or asks a registry."""
    if form.lower() in permissions.FORMATS_OUTSIDE:
        raise QueryError(f"format {form} is not served: it needs a schema or template of its own.", UNKNOWN_FORMAT)
    if form and not form.isalnum():
        raise QueryError(f"{form!r} is no format.", BAD_ARGUMENTS)
