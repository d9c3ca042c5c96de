"""Commands that answer from the topics alone: audit, report, why; and `policy create`, which writes version 0."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infra.cli.context import call, console, entry

policy = typer.Typer(no_args_is_help=True, help="The models being trained.")


@policy.command("create")
def create(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Option(
            help="model in Hugging Face layout, tokenizer and chat template included", exists=True, file_okay=False
        ),
    ],
) -> None:
    """Write version 0 of the configured policy from a model directory. Engines then load it."""
    from infra.bus.connect import connect

    settings = call(context).settings()
    with connect(settings) as bus:
        bus.ensure_topics(settings.layout.specs())
        entry("streams.seal.policies:announce")(settings, bus)
        made = entry("consumers.policy:create")(settings, model, bus)
    console.print(f"policy {settings.policy.name} begins: version 0 at {made['uri']}", highlight=False, soft_wrap=True)


def audit(
    context: typer.Context,
    files: Annotated[bool, typer.Option("--files", help="also hash every kept checkpoint")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Prove from the topics alone that nothing was lost, doubled or trained too late, or name the first violation."""
    raise typer.Exit(entry("consumers.audit.command:run")(call(context).settings(), files, as_json))


def report(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="where to write the page", dir_okay=False)] = Path("millrace-report.html"),
    files: Annotated[bool, typer.Option("--files", help="also hash every kept checkpoint")] = False,
) -> None:
    """Write one self-contained HTML page: rewards, staleness, learners, what became of every group, the audit."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    entry("consumers.report:write")(call(context).settings(), out, files=files)
    console.print(f"wrote {out}", highlight=False, soft_wrap=True)


def why(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="id of an event, call, reply, session, prompt, group, ticket, reward, attempt or dead letter",
        ),
    ],
) -> None:
    """Say what became of something, and why. Exit code 1 when nothing is known of it."""
    text, known = entry("consumers.why:explain")(call(context).settings(), what)
    typer.echo(text)
    raise typer.Exit(0 if known else 1)
