"""What is wrong with settings, in one line each, with the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from millrace.infra.config.settings import PREFIX, Settings
from millrace.infra.errors import ConfigError

RESERVED_NAMES = ("CONFIG", "DEPLOYMENT", "PROCESS", "ROLE", "SETTINGS")
"""Variables that begin like settings and are none: where the file is, which deployment and role a process belongs to,
which of several processes of a gateway it is, and the digest of the settings it was started with."""


def explain(problem: Mapping[str, Any]) -> str:
    """One line for one of pydantic's findings."""
    where = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return f"{_key_of(where)} is no setting{nearest(where[-1], _model_at(where[:-1]).model_fields)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{_key_of(where)}: {message[0].lower()}{message[1:]}" if where else message


def check_names(environment: Mapping[str, str]) -> None:
    """pydantic reads only names that it knows: what begins like a setting and is none would be lost in silence."""
    for name in environment:
        if not name.upper().startswith(PREFIX):
            continue
        first, rest, _ = name[len(PREFIX) :].lower().partition("__")
        fields = Settings.model_fields
        typo = rest or difflib.get_close_matches(first, fields, 1, 0.8)
        if first not in fields and first.upper() not in RESERVED_NAMES and typo:
            raise ConfigError(f"environment variable {name} is no setting{nearest(first, fields)}")


def nearest(word: str, words: Iterable[str]) -> str:
    """`; did you mean X?` for a word close to a known one, else the known ones."""
    options = sorted(words)
    close = difflib.get_close_matches(word, options, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(options)}"


def _key_of(where: list[str]) -> str:
    return f"[{'.'.join(where[:-1])}] {where[-1]}" if len(where) > 1 else where[0]


def _model_at(where: list[str]) -> type[BaseModel]:
    """The model that holds a location; the key of a table (a key's or tenant's name) is skipped."""
    model: type[BaseModel] = Settings
    for part in where:
        kind: Any = model.model_fields[part].annotation if part in model.model_fields else model
        inner = [a for a in get_args(kind) if isinstance(a, type) and issubclass(a, BaseModel)]
        model = inner[0] if inner else kind if isinstance(kind, type) and issubclass(kind, BaseModel) else model
    return model
