"""`millrace trajectory`: one trajectory to read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millrace.apps.cli.context import call, console, entry, reading
from millrace.apps.cli.session_names import newest_session
from millrace.infra.errors import LookError
from millrace.infra.terminal import put_json


def trajectory(
    context: typer.Context,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="id of a trajectory, attempt, event or call, or a place as topic[partition]@offset; or the name that "
            "an agent gave its session, while the gateway answers",
        ),
    ],
    tokens: Annotated[bool, typer.Option("--tokens", help="show every token, not only runs of them")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="model directory whose tokenizer spells tokens; default: a kept version's")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="write a self-contained HTML page there", dir_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show a trajectory: messages, tool calls, rewards and their fate, tokens by version and weight in the loss.

    Example: millrace trajectory ID --page trajectory.html
    """
    settings = call(context).settings()
    show = partial(
        entry("millrace.consumers.tell.command:show"), settings, tokens=tokens, tokenizer=tokenizer, out=page
    )
    with reading():
        try:
            view = show(subject)
        except LookError:
            id = newest_session(settings, subject)
            if id is None:
                raise
            view = show(id)
    if as_json:
        put_json(view.json)
    elif page is not None:
        console.print(f"wrote {page}", highlight=False, soft_wrap=True)
    else:
        console.print(view.tree, highlight=False)
