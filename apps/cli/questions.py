"""`millrace ask`: the questions of the warehouse, each a command with a flag for each of its parameters.

Invariant: the commands are made from the files of the questions when one is asked or listed, so that no other command
loads them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from millrace.apps.cli.context import call, console, entry, in_help
from millrace.apps.cli.sql import AnswerFormat, answer, form_of
from millrace.infra.terminal import RowTable, put

if TYPE_CHECKING:
    from millrace.consumers.warehouse.questions.catalog import Parameter, Question


class Questions(TyperGroup):
    """The group of `millrace ask`, whose commands are the questions."""

    def list_commands(self, ctx: object) -> list[str]:
        return list(_commands())

    def get_command(self, ctx: object, cmd_name: str) -> Any:
        return _commands().get(cmd_name)


ask = typer.Typer(
    cls=Questions,
    invoke_without_command=True,
    rich_markup_mode="rich",
    help="Ask the history a question by name. Without a name: list the questions. Anything else: `millrace sql`.",
)


@ask.callback()
def list_questions(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        table = RowTable("question", "what it answers", "parameters", box=None, header_style="bold")
        for question in _questions():
            flags = [
                parameter.flag if parameter.default is None else f"[{parameter.flag}]"
                for parameter in question.parameters
            ]
            table.add_row(question.name, question.doc, Text(" ".join(flag for flag in flags if flag != "--policy")))
        console.print(table)
        console.print(
            "\n`millrace ask NAME --help` explains one, --show-sql prints it; `millrace sql` asks anything else"
        )


def _questions() -> list[Question]:
    return list(entry("millrace.consumers.warehouse.questions.catalog:questions")().values())


@cache
def _commands() -> dict[str, Any]:
    """A command for each question."""
    app = typer.Typer(rich_markup_mode="rich")
    for question in _questions():
        text = f"{question.doc}\n\n{question.more}" if question.more else question.doc
        app.command(question.name, help=in_help(text))(_asking(question))
    return dict(typer.main.get_group(app).commands)


def _asking(question: Question) -> Callable[..., None]:
    """The function behind a question's command; its flags are the question's parameters."""

    def asking(
        context: typer.Context, *, form: AnswerFormat | None, out: Path | None, show: bool, **given: object
    ) -> None:
        if show:
            put(question.sql)
            return
        settings = call(context).settings()
        if any(parameter.name == "policy" and parameter.default is None for parameter in question.parameters):
            given["policy"] = given["policy"] or settings.policy.name
        values = entry("millrace.consumers.warehouse.questions.catalog:values")
        texts = values(question, {name: str(value) for name, value in given.items() if value is not None})
        answer_form = form_of(form, out)
        leave = entry("millrace.consumers.warehouse.client:leave")
        with entry("millrace.consumers.warehouse.client:open_asking")(settings, leave) as asking:
            entry("millrace.consumers.warehouse.questions.versions:check")(asking, question, texts)
            answer(asking, question.sql, answer_form, out, texts)

    question_flags = [
        _flag(parameter.name, str, parameter.doc + _default(parameter), parameter.flag)
        for parameter in question.parameters
    ]
    more = [
        _flag("form", AnswerFormat, "default: by the name of -o, else table", "--format", "-f"),
        _flag("out", Path, "file to write", "--out", "-o"),
        _flag("show", bool, "print the query, to begin one of your own with", "--show-sql"),
    ]
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    # Typer reads both from a function; the one is no attribute that functions have by themselves.
    vars(asking)["__signature__"] = inspect.Signature([first, *question_flags, *more])
    asking.__annotations__ = {parameter.name: parameter.annotation for parameter in (first, *question_flags, *more)}
    return asking


def _default(parameter: Parameter) -> str:
    if parameter.name == "policy" and parameter.default is None:
        return "; default: the configured one"
    return "" if parameter.default is None else f"; default: {parameter.default}" if parameter.default else ""


def _flag(name: str, kind: type, doc: str, *flags: str) -> inspect.Parameter:
    """An optional flag; what a question cannot do without it says itself, in a sentence."""
    option = typer.Option(*flags, help=in_help(doc), show_default=False)
    annotation: Any = bool if kind is bool else kind | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[annotation, option],
        default=False if kind is bool else None,
    )
