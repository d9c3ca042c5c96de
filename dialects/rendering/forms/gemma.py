"""Gemma 4: `call:f{a:1,b:<|"|>text<|"|>}`, a notation of its own, between `<|tool_call>` and `<tool_call|>`; thoughts
are a channel."""

from __future__ import annotations

import json
import re

from millrace.dialects.rendering.base import ToolCall
from millrace.dialects.rendering.forms.base import Form, Schemas, call, to_json_text
from millrace.schemas import bounds
from millrace.schemas.json_values import Json, JsonObject

QUOTE = '<|"|>'
HEAD = re.compile(r"\s*call:([^{}\s]+)")
WORD = re.compile(r"[^,\[\]{}<]+")
KEY = re.compile(r"[^:,\[\]{}<]+")


def read(text: str, schemas: Schemas) -> list[ToolCall]:
    """One call."""
    head = HEAD.match(text)
    if head is None:
        raise ValueError("a call begins with its name")
    arguments, at = _object(text, head.end(), 0)
    if text[at:].strip():
        raise ValueError("a call ends with its arguments")
    return [call(head.group(1), to_json_text(arguments))]


def _object(text: str, at: int, depth: int) -> tuple[JsonObject, int]:
    at = _skip(text, at, "{")
    members: JsonObject = {}
    while not text.startswith("}", at):
        if members:
            at = _skip(text, at, ",")
        if text.startswith(QUOTE, at):
            key, at = _string(text, at)
        else:
            key, at = _word(KEY, text, at)
        members[key], at = _value(text, _skip(text, at, ":"), depth)
    return members, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list[Json], int]:
    at = _skip(text, at, "[")
    values: list[Json] = []
    while not text.startswith("]", at):
        if values:
            at = _skip(text, at, ",")
        value, at = _value(text, at, depth)
        values.append(value)
    return values, at + 1


def _value(text: str, at: int, depth: int) -> tuple[Json, int]:
    if depth > bounds.DEPTH:
        raise ValueError("arguments nest too deep")
    if text.startswith(QUOTE, at):
        return _string(text, at)
    if text.startswith("{", at):
        return _object(text, at, depth + 1)
    if text.startswith("[", at):
        return _list(text, at, depth + 1)
    word, at = _word(WORD, text, at)
    return json.loads(word), at


def _string(text: str, at: int) -> tuple[str, int]:
    end = text.index(QUOTE, at + len(QUOTE))
    return text[at + len(QUOTE) : end], end + len(QUOTE)


def _word(pattern: re.Pattern[str], text: str, at: int) -> tuple[str, int]:
    match = pattern.match(text, at)
    if match is None:
        raise ValueError("a value is missing")
    return match.group(), match.end()


def _skip(text: str, at: int, sign: str) -> int:
    if not text.startswith(sign, at):
        raise ValueError(f"{sign} is missing")
    return at + 1


GEMMA = Form(
    "gemma", read, "<|tool_call>", "<tool_call|>", tokens=(QUOTE,), think=("<|channel>", "<channel|>"), head="thought\n"
)
