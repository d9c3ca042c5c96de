"""The page of the public face, docs/api.md, made from the code that it describes.

    .venv/bin/python -m tests.docs.public

Invariant: what stands there is every public name, its signature and its docstring, and nothing that the code does not
say."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any, get_args

from millrace.infra import errors
from millrace.producers import client, tools
from millrace.schemas import errors as of_records

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
OF_TOOLS = ("tool", "active")
"""what both say that is no report to the gateway"""
TOP = """# The public face

`from millrace import Session, AsyncSession, tool, errors` is all that an agent's own code needs, and what stays between
releases. An agent that only calls a model needs none of it: the stock `openai` client does. How to write an agent or a
verifier is in [tasks](tasks.md), what a session means in [gateway](gateway.md), and what may be said in it in
[events](events.md). The same routes for other languages are in [openapi.json](openapi.json). This page is made from the
code."""
SESSIONS = """## Session and AsyncSession

`Session` does at once what `AsyncSession` does when it is awaited: `with Session.start(...)`, or
`async with await AsyncSession.start(...)`. Both are made by `start` or `attach`. Leaving the block ends a session that
was started, as failed when an exception leaves it."""
SAID = """### What both say of an episode

Each returns what the gateway answers, a `dict`; those of `AsyncSession` are awaited. A refusal is raised as
`GatewayRefused`, silence as `GatewayUnreachable`."""
TOOLS = """### Tools that report themselves

How they are used is in [the client](client.md)."""
TOOL = """## tool

`from millrace import tool`, in front of a function: `@tool`, or `@tool(...)` with what follows."""
ERRORS = """## errors

What Millrace raises on purpose, as `millrace.errors.NAME`: what each is a kind of, and what it means."""
CLIENT = """A session raises the following two, from `millrace.producers.client`. Both are kinds of
`millrace.errors.GatewayError`, so that one is all that an agent's code needs to catch."""


def page() -> str:
    """The whole page."""
    both = [name for name, _ in methods(client.Speaker) if name not in OF_TOOLS]
    parts = [TOP, SESSIONS]
    for kind in (client.Session, client.AsyncSession):
        parts += [f"### {kind.__name__}", sentence(kind), "\n".join(line(name, of) for name, of in methods(kind))]
    parts += [SAID, "\n".join(line(name, vars(client.Speaker)[name]) for name in both)]
    parts += [TOOLS, "\n".join(line(name, vars(client.Speaker)[name]) for name in OF_TOOLS)]
    parts += [TOOL, line("tool", tools.tool), ERRORS, "\n".join(error(kind) for kind in kinds(errors)), CLIENT]
    parts += ["\n".join(error(kind) for kind in kinds(client))]
    return "\n\n".join(parts) + "\n"


def methods(kind: type) -> list[tuple[str, Any]]:
    """The public methods that a class defines itself, in its order."""
    return [(name, of) for name, of in vars(kind).items() if not name.startswith("_") and callable_of(of) is not None]


def callable_of(value: Any) -> Any:
    """The function behind a method; None for what is none."""
    of = getattr(value, "__func__", value)
    return of if inspect.isfunction(of) else None


def kinds(module: Any) -> list[type[Exception]]:
    """The errors that a module defines, and the codec's where it names them, in its order."""
    found = [of for of in vars(module).values() if inspect.isclass(of) and issubclass(of, Exception)]
    return [of for of in found if of.__module__ in (module.__name__, of_records.__name__)]


def line(name: str, method: Any) -> str:
    """A method's signature and what it does."""
    of = callable_of(method)
    taken, starred = [], False
    for one in inspect.signature(of).parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and not starred:
            taken.append("*")
            starred = True
        taken.append(parameter(one))
    word = "await " if inspect.iscoroutinefunction(of) else ""
    return f"- `{word}{name}({', '.join(taken)})`: {sentence(of)}"


def parameter(one: inspect.Parameter) -> str:
    """A parameter as it is written, with the words that a name stands for."""
    stars = "**" if one.kind is one.VAR_KEYWORD else ""
    told = str(one.annotation)
    for name in ("ToolStatus", "SideEffect"):
        told = told.replace(name, " | ".join(f'"{word}"' for word in get_args(getattr(client, name))))
    default = json.dumps(one.default) if isinstance(one.default, str) else repr(one.default)
    return f"{stars}{one.name}: {told}" + ("" if one.default is one.empty else f" = {default}")


def error(kind: type[Exception]) -> str:
    """An error, what it is a kind of, and what it means."""
    base = kind.__bases__[0]
    of = "" if base is Exception else f" ({base.__name__})"
    return f"- `{kind.__name__}`{of}: {sentence(kind)}"


def sentence(of: Any) -> str:
    """A docstring on one line."""
    assert of.__doc__, f"{of.__name__} is public and has no docstring"
    return re.sub(r"\s+", " ", of.__doc__).strip()


if __name__ == "__main__":
    PAGE.write_text(page())
