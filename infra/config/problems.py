"""What is wrong with settings, in one line each, with the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from millrace.infra.config.settings import PREFIX, Settings
from millrace.infra.errors import ConfigError

RESERVED_NAMES = ("CONFIG", "DEPLOYMENT", "PROCESS", "ROLE", "SETTINGS")
"""Variables that begin like settings and are none: where the file is, which deployment and role a process belongs to,
which of several processes of a gateway it is, and the digest of the settings it was started with."""


def explain(problems: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line for each of pydantic's findings; for a setting of several kinds one that names them all."""
    lines: dict[str, str] = {}
    for problem in problems:
        where = _without_kind([str(part) for part in problem["loc"]])
        message = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            key = f"{_key_of(where)} is no setting"
            lines[key] = key + nearest(where[-1], _model_at(where[:-1]).model_fields)
        elif not where:
            lines[message] = message
        else:
            key, says = _key_of(where), f"{message[0].lower()}{message[1:]}"
            lines[key] = (
                f"{lines[key]}, or {says.removeprefix('input should be ')}" if key in lines else f"{key}: {says}"
            )
    return list(lines.values())


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


def _without_kind(where: list[str]) -> list[str]:
    """A location without the kind, of several that a setting may have, that pydantic ends it with."""
    table = where[:-1]
    fields = _model_at(table[:-1]).model_fields if table else {}
    annotation = fields[table[-1]].annotation if table and table[-1] in fields else None
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return table if get_origin(annotation) in (Union, UnionType) and len(kinds) > 1 else where


def _model_at(where: list[str]) -> type[BaseModel]:
    """The model that holds a location; the key of a table (a key's or tenant's name) is skipped."""
    model: type[BaseModel] = Settings
    for part in where:
        kind: Any = model.model_fields[part].annotation if part in model.model_fields else model
        inner = [a for a in get_args(kind) if isinstance(a, type) and issubclass(a, BaseModel)]
        model = inner[0] if inner else kind if isinstance(kind, type) and issubclass(kind, BaseModel) else model
    return model
