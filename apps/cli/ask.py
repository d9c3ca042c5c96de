"""Commands that answer from the topics alone: audit, report, why; and `policy create`, which writes version 0."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millrace.apps.cli.context import call, console, entry, reading
from millrace.apps.cli.session_names import newest_session
from millrace.infra.terminal import put, put_json

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
    untie: Annotated[
        bool, typer.Option("--untie", help="give the model an output matrix of its own, if it shares its embeddings")
    ] = False,
) -> None:
    """Write version 0 of the configured policy from a model directory. Engines then load it."""
    from millrace.infra.connect import connect_now

    settings = call(context).settings()
    with connect_now(settings) as bus:
        bus.ensure_topics(settings.layout.specs())
        entry("millrace.streams.seal.policy_terms:announce")(settings, bus)
        version = entry("millrace.consumers.version_zero:create")(settings, model, bus, untie=untie)
    console.print(
        f"policy {settings.policy.name} begins: version 0 at {version['uri']}", highlight=False, soft_wrap=True
    )


def audit(
    context: typer.Context,
    files: Annotated[bool, typer.Option("--files", help="also hash every kept checkpoint")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="do not fold every turn again")] = False,
) -> None:
    """Prove from the topics alone that nothing was lost, doubled or trained too late, or name the first violation."""
    with reading():
        code = entry("millrace.consumers.audit.command:run")(call(context).settings(), files, as_json, quick)
    raise typer.Exit(code)


def report(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="where to write the page", dir_okay=False)] = Path("millrace-report.html"),
    files: Annotated[bool, typer.Option("--files", help="also hash every kept checkpoint")] = False,
) -> None:
    """Write one self-contained HTML page: rewards, staleness, learners, what became of every group, the audit."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with reading():
        entry("millrace.consumers.tell.command:report")(call(context).settings(), out, files=files)
    console.print(f"wrote {out}", highlight=False, soft_wrap=True)


def why(
    context: typer.Context,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="id of an event, call, reply, session, prompt, group, ticket, reward, attempt or dead letter; or the "
            "name that an agent gave its session, while the gateway answers",
        ),
    ],
    text: Annotated[
        bool, typer.Option("--text", help="also show what was said, as it was stored: without what was taken out of it")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Say what became of something, and why. Exit code 1 when nothing is known of it."""
    settings = call(context).settings()
    width = console.width if console.is_terminal and not as_json else None
    explain = partial(entry("millrace.consumers.tell.command:explain"), settings, text=text, width=width)
    with reading():
        answer, is_known = explain(subject)
        if not is_known and (id := newest_session(settings, subject)):
            answer, is_known = explain(id)
    if as_json:
        put_json({"id": subject, "known": is_known, "said": answer.splitlines()})
    else:
        put(answer)
    raise typer.Exit(0 if is_known else 1)
