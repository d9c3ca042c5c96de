"""Errors in ClickHouse's own form: a code, a name, a message, and the HTTP status that a server answers with. Pure."""

from __future__ import annotations

import re

from millrace.infra.errors import WarehouseError

_FORM = re.compile(r"Code: (\d+)\. DB::Exception: (.*)", re.DOTALL)
_NAME = re.compile(r" ?\(([A-Z][A-Z0-9_]+)\)\.?\s*$")
_VERSION = re.compile(r" ?\(version [^()]*(?:\([^()]*\))?\)")
_SCOPE = re.compile(r": In scope (?:SELECT formatQuerySingleLine\(|EXPLAIN AST ).*$", re.DOTALL)

BAD_ARGUMENTS, SYNTAX_ERROR, UNKNOWN_DATABASE, READONLY = 36, 62, 81, 164
REQUIRED_PASSWORD, TOO_MANY_QUERIES, ACCESS_DENIED, AUTHENTICATION_FAILED = 194, 202, 497, 516
NOT_IMPLEMENTED, UNKNOWN_FORMAT, TOO_LARGE, LENGTH_REQUIRED = 48, 73, 1010, 381
UNKNOWN_TABLE, TIMEOUT = 60, 159

NAMES = {
    BAD_ARGUMENTS: "BAD_ARGUMENTS",
    SYNTAX_ERROR: "SYNTAX_ERROR",
    UNKNOWN_DATABASE: "UNKNOWN_DATABASE",
    READONLY: "READONLY",
    REQUIRED_PASSWORD: "REQUIRED_PASSWORD",
    TOO_MANY_QUERIES: "TOO_MANY_SIMULTANEOUS_QUERIES",
    TIMEOUT: "TIMEOUT_EXCEEDED",
    ACCESS_DENIED: "ACCESS_DENIED",
    AUTHENTICATION_FAILED: "AUTHENTICATION_FAILED",
    NOT_IMPLEMENTED: "NOT_IMPLEMENTED",
    UNKNOWN_FORMAT: "UNKNOWN_FORMAT",
    TOO_LARGE: "QUERY_IS_TOO_LARGE",
}

_STATUS = {
    REQUIRED_PASSWORD: 401,
    **dict.fromkeys((READONLY, 192, 193, ACCESS_DENIED, AUTHENTICATION_FAILED), 403),
    **dict.fromkeys(
        (
            6,
            15,
            16,
            25,
            26,
            27,
            36,
            38,
            41,
            42,
            43,
            44,
            53,
            62,
            69,
            70,
            72,
            117,
            321,
            376,
            377,
            386,
            427,
            441,
            456,
            457,
        ),
        400,
    ),
    **dict.fromkeys((46, 47, 50, 56, 60, 63, 73, 81, 115, 511), 404),
    TOO_LARGE: 413,
    NOT_IMPLEMENTED: 501,
    TOO_MANY_QUERIES: 503,
    TIMEOUT: 408,
}
"""as a server answers, and 403 for what a reader may not do"""


_NEXT = {
    TIMEOUT: "[warehouse] query_seconds is the longest that a query may take.",
    241: "[warehouse] query_memory_mb is what a query may take: group by less, or ask for fewer columns.",
    396: "[warehouse] query_rows is the most that a query may give: add LIMIT, or aggregate.",
}
"""what to do about a limit"""
BRIEF = 200


class QueryError(WarehouseError):
    """A query was refused, or failed. `code` and `name` are ClickHouse's; `said` is the message without them."""

    def __init__(self, message: str, code: int, name: str = "") -> None:
        super().__init__(message, code)
        self.said = message
        self.name = name or NAMES.get(code, "UNKNOWN_EXCEPTION")

    @property
    def status(self) -> int:
        """HTTP status."""
        return _STATUS.get(self.code, 500)

    def wire(self, version: str) -> str:
        """What a server would send."""
        return f"Code: {self.code}. DB::Exception: {self.said} ({self.name}) (version {version})\n"


def engine_message(error: RuntimeError | UnicodeDecodeError) -> str:
    """What the engine said. What it quotes of a row need not be text."""
    return error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)


def of_engine(text: str) -> QueryError:
    """The error behind what the engine said, without its repetitions and without the endpoint's own queries."""
    match = _FORM.search(text)
    if not match:
        return QueryError(
            text.strip() or "the engine failed without a word: its log may say why", 1002, "UNKNOWN_EXCEPTION"
        )
    code, message = int(match[1]), match[2].strip()
    while inner := _FORM.match(message):
        message = inner[2].strip()
    name = ""
    while True:
        cut = _VERSION.sub("", message).rstrip()
        if tail := _NAME.search(cut):
            name, cut = name or tail[1], cut[: tail.start()].rstrip()
        if cut == message:
            break
        message = cut
    message = _SCOPE.sub("", message).rstrip()
    message = message if message.endswith((".", "?", "!")) else f"{message}."
    return QueryError(with_advice(message, code), code, name)


def with_advice(message: str, code: int) -> str:
    """What was said, and what to do about it where it is a limit."""
    return f"{message} {_NEXT[code]}" if code in _NEXT else message


def brief(error: QueryError) -> QueryError:
    """The same for a person: without the long list of what a parser would have taken."""
    message, _, choices = error.said.partition(" Expected one of: ")
    if len(choices) > BRIEF:
        return QueryError(f"{message}", error.code, error.name)
    return error
