"""The commented `millrace.toml` that `init` writes: every setting with its meaning and its default.

Made from the models themselves, so that the two cannot differ."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import tomlkit
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from millrace.infra.config import Settings
from millrace.schemas.json_values import Json

NO_VALUES: Mapping[str, Json] = MappingProxyType({})
HEAD = """\
# Settings of one Millrace deployment. A line that begins with `#key` shows a default: take the `#` away to change it.
# MILLRACE_SECTION__KEY in the environment overrides this file, `millrace --set section.key=value` overrides both.
# Keep secrets in the environment, or keep this file to yourself.
"""


def render(namespace: str, policy: str, extra: Mapping[str, Json] = NO_VALUES) -> str:
    """The file for a new deployment: two names, and `extra` by dotted name, set; everything else commented out."""
    values: dict[tuple[str, str], object] = {("", "namespace"): namespace, ("policy", "name"): policy}
    values |= {(section, key): value for name, value in extra.items() for section, _, key in [name.rpartition(".")]}
    parts = [HEAD]
    fields = Settings.model_fields
    top_keys = [name for name, field in fields.items() if not _is_section(field)]
    parts.append("\n".join(_lines("", name, fields[name], values) for name in top_keys))
    for name, field in fields.items():
        if _is_section(field):
            model: Any = field.annotation
            rows = [_lines(name, key, inner, values) for key, inner in model.model_fields.items()]
            parts.append("\n".join([f"# {_first(model)}", f"[{name}]", *rows]))
    return "\n\n".join(parts) + "\n"


def _lines(section: str, key: str, field: FieldInfo, values: Mapping[tuple[str, str], object]) -> str:
    comment = "\n".join(textwrap.wrap(field.description or "", 118, initial_indent="# ", subsequent_indent="# "))
    value = values.get((section, key))
    if value is None and field.default is None:
        return f"{comment}\n# {key}: not set"
    line = f"{key} = {_toml(field.default)}" if value is None else f"{key} = {_toml(value)}"
    return f"{comment}\n{'#' if value is None else ''}{line}"


def _toml(value: object) -> str:
    simple = _simple(value)
    if not isinstance(simple, dict):
        return tomlkit.item(simple).as_string()
    table = tomlkit.inline_table()
    table.update(simple)
    return table.as_string()


def _simple(value: object) -> Json:
    match value:
        case BaseModel():
            return {key: _simple(inner) for key, inner in value}
        case dict():
            return {key: _simple(inner) for key, inner in value.items()}
        case tuple():
            return [_simple(inner) for inner in value]
        case SecretStr():
            return ""
        case bool() | int() | float():
            return value
        case _:
            text = str(value)
            return "" if text == "." else text


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _first(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().partition("\n")[0]
