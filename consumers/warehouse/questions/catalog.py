"""Questions: named queries over the views, with parameters. `millrace ask` lists them and asks them.

Each is a file of `asked/`: a sentence, a line for each parameter (`-- version UInt64: which version`, with
` = default` behind the type where it may be left out), and one SELECT in which parameters stand as ClickHouse writes
them, `{version:UInt64}`.

Invariant: values reach the engine as parameters, never as text of the query."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from millrace.consumers.warehouse.questions.headers import read
from millrace.infra.errors import QuestionError

_USED = re.compile(r"\{(\w+):(\w+)\}")
POLICY = "policy"
"""the parameter that the configured policy is the default of"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """`type` is ClickHouse's; `default`: its value where none is given, null where one must be."""

    name: str
    type: str
    default: str | None
    doc: str

    @property
    def is_integer(self) -> bool:
        """Whether only whole numbers will do."""
        return "Int" in self.type

    @property
    def flag(self) -> str:
        """As it is given on the command line."""
        return f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Question:
    """A named query. `doc` is one sentence, `more` what a reader of its answer should know."""

    name: str
    doc: str
    more: str
    parameters: tuple[Parameter, ...]
    sql: str


@cache
def questions() -> Mapping[str, Question]:
    """Every question by name. Raises ValueError where a file uses other parameters than it documents."""
    return {name: _question(name, file.doc, file.more, file.names, file.sql) for name, file in read("asked").items()}


def _question(name: str, doc: str, more: str, names: Mapping[str, str], sql: str) -> Question:
    parameters = tuple(_parameter(head, text) for head, text in names.items())
    documentation = {(parameter.name, parameter.type) for parameter in parameters}
    if set(_USED.findall(sql)) != documentation:
        raise ValueError(f"question {name} uses other parameters than it documents")
    return Question(name, doc, more, parameters, sql)


def _parameter(head: str, doc: str) -> Parameter:
    name, _, rest = head.partition(" ")
    kind, equals, default = rest.partition(" = ")
    return Parameter(name, kind, default.strip("'") if equals else None, doc)


def values(question: Question, arguments: Mapping[str, str]) -> dict[str, str]:
    """A value for every parameter, as text. Raises QuestionError for one that is missing, unknown or no number."""
    unknown = set(arguments) - {parameter.name for parameter in question.parameters}
    if unknown:
        flags = ", ".join(parameter.flag for parameter in question.parameters) or "none"
        raise QuestionError(f"{question.name} takes no {', '.join(sorted(unknown))}; its parameters: {flags}")
    texts = {}
    for parameter in question.parameters:
        value = arguments.get(parameter.name, parameter.default)
        if value is None:
            raise QuestionError(f"{question.name} needs {parameter.flag}: {parameter.doc}")
        if parameter.is_integer and not re.fullmatch(
            r"-?[0-9]{1,18}" if parameter.type[0] == "I" else r"[0-9]{1,18}", value
        ):
            raise QuestionError(f"{parameter.flag} is a whole number ({parameter.doc}), not {value!r}")
        texts[parameter.name] = value
    return texts
