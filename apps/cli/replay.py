"""Commands that run history again: `replay prove`, `replay branch`, `replay reward`, `replay rebuild`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.apps.cli import replay_branch, replay_rebuild, replay_reward
from millrace.apps.cli.context import call, entry
from millrace.infra.errors import ConfigError

replay = typer.Typer(
    no_args_is_help=True,
    help="Run history again: prove how versions came to be, train from it, judge it anew, make topics again.",
)
replay.command("branch")(replay_branch.branch)
replay.command("reward")(replay_reward.reward)
replay.command("rebuild")(replay_rebuild.rebuild)


@replay.command("prove")
def prove(
    context: typer.Context,
    versions: Annotated[str, typer.Argument(metavar="VERSIONS", help="one (12), a range (10..20) or all")] = "",
    recorded: Annotated[
        bool,
        typer.Option("--recorded", help="take the learner's configuration from the ledger instead of the settings"),
    ] = False,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="train though code, configuration, libraries or machine differ, and compare within the tolerance of "
            "one step",
        ),
    ] = False,
    layout: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT", help="also train each step alone in this layout (torch:d2) and compare within tolerance"
        ),
    ] = "",
    dump: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write the exact tensors of each step there", file_okay=False)
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="train a step that --dump wrote (DIR/v12), without Kafka",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Train versions again from the log and compare them bit for bit with what is on record.

    It begins at the nearest version whose files are kept, needs no engine, joins no group and writes nothing to the
    log. Exit code 1 when a version differs; then the first file or tensor that differs is named."""
    if (load is None) == (not versions):
        raise ConfigError("name the versions to prove (12, 10..20 or all), or a dumped step with --load DIR")
    settings = call(context).settings()
    if load is not None:
        if recorded or layout or dump is not None:
            raise ConfigError("--load trains one dumped step: of the other options it takes --anyway and --json alone")
        raise typer.Exit(
            entry("millrace.consumers.replay.prove.command:train_dump")(settings, load, anyway=anyway, as_json=as_json)
        )
    options = entry("millrace.consumers.replay.prove.command:ReplayOptions")(
        versions=versions, recorded=recorded, anyway=anyway, layout=layout, dump=dump
    )
    raise typer.Exit(entry("millrace.consumers.replay.prove.command:prove")(settings, options, as_json=as_json))
