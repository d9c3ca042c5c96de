"""Secrets that stand inside other values: passwords of URLs, and arguments of an engine that are keys.

Invariant: what is masked here is what a person would not want in a bug report; sections of type SecretStr are masked by
pydantic already."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

STARS = "**********"
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^/?#@\s:]*)(:(?P<password>[^/?#\s]*))?@")
_SECRET = r"(?:[\w.-]*[_.-])?(?:api)?(?:key|token|secret|password|passwd|credentials?|auth)"
_QUERY = re.compile(rf"(?P<name>[?&;]{_SECRET}=)[^&;#\s]*", re.IGNORECASE)
_FLAG = re.compile(rf"(?P<name>-{{1,2}}{_SECRET})(?P<value>=.*)?", re.IGNORECASE | re.DOTALL)
_NAME = re.compile(_SECRET, re.IGNORECASE)
_JSON_FIELD = re.compile(rf'(?P<name>"{_SECRET}"\s*:\s*)"(?:[^"\\]|\\.)*"', re.IGNORECASE)


def in_text(text: str) -> str:
    """A value without the passwords of URLs and of JSON in it."""
    text = _USERINFO.sub(_userinfo, text)
    text = _QUERY.sub(rf"\g<name>{STARS}", text)
    return _JSON_FIELD.sub(rf'\g<name>"{STARS}"', text)


def in_values(value: object, name: str = "") -> Any:
    """A JSON value without the strings in it whose names say that they are secrets, and without passwords in others."""
    if isinstance(value, Mapping):
        return {key: in_values(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [in_values(inner, name) for inner in value]
    if not isinstance(value, str):
        return value
    return STARS if value and _NAME.fullmatch(name) else in_text(value)


def in_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command, without the values of those that name secrets, as `--api-key K` and `--api-key=K`."""
    out: list[str] = []
    is_secret = False
    for argument in arguments:
        if is_secret and not argument.startswith("--"):
            out.append(STARS)
            continue
        match = _FLAG.fullmatch(argument)
        is_secret = match is not None and match["value"] is None
        out.append(f"{match['name']}={STARS}" if match and match["value"] is not None else in_text(argument))
    return out


def _userinfo(match: re.Match[str]) -> str:
    # A name without a password is as often a token as a name.
    user = match["user"] if match["password"] is not None else STARS
    return f"{match['scheme']}{user}{'' if match['password'] is None else ':' + STARS}@"
