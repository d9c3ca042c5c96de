"""What a form of tool calls is: the tokens around a block of calls, and the reading of what stands between them.

Invariants: a block is read whole or not at all (ValueError), so that what is no sound call is handed to the client as
the text that it is; arguments are JSON text of an object, as sampled where the form writes JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from millrace.dialects.rendering.base import ToolCall, Tools
from millrace.schemas import bounds
from millrace.schemas.json_values import Json

Schemas: TypeAlias = Mapping[str, Mapping[str, Json]]
"""of each tool that is offered, the schemas of its arguments by name"""
CONSTANTS = {"True": True, "False": False, "None": None}
"""what templates that know no JSON write"""


class ReadCalls(Protocol):
    """The calls of a block. Raises ValueError for a block that holds anything else."""

    def __call__(self, text: str, schemas: Schemas) -> list[ToolCall]: ...


@dataclass(frozen=True, slots=True)
class Form:
    """`open` and `close` are the tokens around a block of calls, which `read` reads. Without `close` a block ends with
    the reply; without `open` a reply that begins as `bare` says is a block as a whole. `tokens` are others that its
    tokenizers have. `think` are the tokens around thoughts, which begin with the words `head`. Where `channels`, all
    of a reply is in messages, which have a parser of their own."""

    name: str
    read: ReadCalls | None = None
    open: str | None = None
    close: str | None = None
    bare: Callable[[str], bool | None] | None = None
    """whether text is the beginning of a block; None: too short to say"""
    tokens: tuple[str, ...] = ()
    think: tuple[str, str] = ("<think>", "</think>")
    head: str = ""
    channels: bool = False
    named: re.Pattern[str] | None = None
    """how a block begins, up to the object that is the arguments of its first call, whose name is the group: these are
    told as they are sampled"""


SIGNS = re.compile(r'["{}]')
QUOTE_SIGNS = re.compile(r'["\\]')
HEAD_CHARS = 2 * bounds.NAME_BYTES
"""characters within which a block names its call, else its arguments are told when they are whole"""


class ArgumentsDraft:
    """The arguments of a call while they are sampled: the text from a brace to the one that closes it, and nothing
    else. Reads a block that begins as `head`; without one, arguments alone of the function `name`."""

    def __init__(self, head: re.Pattern[str] | None, name: str = "") -> None:
        self.name = name
        self._head = head
        self._rest = ""
        self._depth = 0
        self._quoted = self._escaped = self._done = False

    def add(self, piece: str) -> str:
        """What more text of the block adds to the arguments."""
        if self._done or not piece:
            return ""
        if not self._depth:
            return self._begin(piece)
        return piece[: self._end(piece)]

    def _begin(self, piece: str) -> str:
        self._rest += piece
        if self._head is not None:
            match = self._head.match(self._rest)
            text = self._rest[match.end() :] if match else ""
            name = match.group(1) if match else ""
        else:
            text, name = self._rest.lstrip(), self.name
        opening = text[1:].lstrip()
        if not text.startswith("{") or not opening:
            self._done = len(self._rest) > HEAD_CHARS
            return ""
        if opening[0] not in '"}' or not 0 < len(name.encode(errors="replace")) <= bounds.NAME_BYTES:
            self._done = True  # no sound call begins so
            return ""
        self.name, self._rest = name, ""
        return text[: self._end(text)]

    def _end(self, text: str) -> int:
        """How many characters of the text belong to the arguments."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            sign = (QUOTE_SIGNS if self._quoted else SIGNS).search(text, at)
            if sign is None:
                break
            at = sign.end()
            match sign.group():
                case "\\":
                    self._escaped = True
                case '"':
                    self._quoted = not self._quoted
                case "{":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if not self._depth:
                        self._done = True
                        return at
        return len(text)

    @property
    def is_whole(self) -> bool:
        """Whether the arguments came to their end."""
        return self._done and bool(self.name)


def schemas_of(tools: Tools) -> Schemas:
    """The schemas of what is offered; a tool in another shape has none."""
    schemas: dict[str, Mapping[str, Json]] = {}
    for tool in tools or ():
        match tool.get("function"):
            case {"name": str(name), "parameters": {"properties": dict(properties)}}:
                schemas[name] = properties
            case {"name": str(name)}:
                schemas[name] = {}
    return schemas


def named(name: object, arguments: str) -> ToolCall:
    """A call as it is told. Raises ValueError for one without a name, or with one that is too long, or with text that
    is no Unicode."""
    if not isinstance(name, str) or not name or len(name.encode()) > bounds.NAME_BYTES:
        raise ValueError("a call has a name")
    arguments.encode()
    return ToolCall(name, arguments)


def call(name: object, arguments: str) -> ToolCall:
    """A call with `arguments`, JSON text of an object. Raises ValueError where they are none, and as `named`."""
    if not isinstance(json.loads(arguments, parse_constant=_refuse_constant), dict):
        raise ValueError("arguments are an object")
    return named(name, arguments)


def to_json_text(arguments: object) -> str:
    """Arguments as JSON text; text that is JSON already stays. Raises ValueError for NaN."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def json_calls(text: str) -> list[ToolCall]:
    """The calls of a JSON object or of a list of them, with their arguments as `arguments` or `parameters`."""
    value = json.loads(text)
    calls = []
    for one in value if isinstance(value, list) else [value]:
        match one:
            case {"function": dict(function)}:
                one = function
            case dict():
                pass
            case _:
                raise ValueError("a call is an object")
        calls.append(call(one.get("name"), to_json_text(one.get("arguments", one.get("parameters", {})))))
    if not calls:
        raise ValueError("no call")
    return calls


def typed_value(text: str, schema: object) -> Json:
    """A value that the form writes without quotes, of the type that its schema asks for: text where it asks for text or
    where the value is no JSON."""
    kinds = _kinds(schema)
    if "string" in kinds and not kinds - {"string", "null"}:
        return None if "null" in kinds and text in ("null", "None") else text
    if text in CONSTANTS:
        return CONSTANTS[text]
    try:
        value: Json = json.loads(text, parse_constant=_refuse_constant)
        return value
    except ValueError:
        return text


def _kinds(schema: object) -> set[str]:
    """The types that a schema names, at its top."""
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type")
    kinds = {types} if isinstance(types, str) else {kind for kind in _items_of(types) if isinstance(kind, str)}
    for inner in [*_items_of(schema.get("anyOf")), *_items_of(schema.get("oneOf"))]:
        kinds |= _kinds(inner)
    values = _items_of(schema.get("enum"))
    if not kinds and values and all(isinstance(one, str) for one in values):
        kinds = {"string"}
    return kinds


def _items_of(value: object) -> Sequence[Json]:
    """A list of a schema, which is whatever a client sent."""
    return value if isinstance(value, list) else ()


def _refuse_constant(constant: str) -> Json:
    raise ValueError(f"{constant} is no JSON")
