"""`millrace import`: episodes of other tools, out of files into the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from millrace.apps.cli.context import call, complain, console, entry
from millrace.infra.config import Settings
from millrace.infra.terminal import put_json

if TYPE_CHECKING:
    from millrace.formats.imports.run import ImportSummary

LAYOUTS = (
    "chat (chat JSONL, openai, trl-messages), trl, trl-preference, openai-preference, verifiers, verl, atropos, otlp, "
    "and jsonl, parquet, hf as export writes them"
)


def import_(
    context: typer.Context,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="JSON lines (also .gz), Parquet, or a Hugging Face dataset")
    ],
    layout: Annotated[str, typer.Option(help=f"how to read: {LAYOUTS}; default: what the first row looks like")] = "",
    tenant: Annotated[
        str, typer.Option(help="whose it is: the rules of this tenant decide what it is used for")
    ] = "local",
    split: Annotated[
        str, typer.Option(help="train or evaluation; a row that says evaluation stays evaluation")
    ] = "train",
    task: Annotated[str, typer.Option(help="task id of every row; default: each row's own, else one a prompt")] = "",
    on_error: Annotated[
        str, typer.Option("--on-error", help="stop: import nothing where a row is refused; skip: import the others")
    ] = "stop",
    refusal_file: Annotated[
        Path | None,
        typer.Option("--refused", metavar="FILE", help="write a JSON line for each refused row, with its reason"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="read and count, send nothing; needs no Kafka")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print what was done as JSON")] = False,
) -> None:
    """Bring episodes of other tools into the log, where they are governed, sealed and kept like any other.

    They are history, for SQL, judging and export: nobody here saw their tokens sampled, so none of them trains.
    Importing the same rows again changes nothing.

    Example: millrace import chats.jsonl --tenant acme --dry-run
    """
    settings = call(context).settings()
    choose = entry("millrace.formats.imports.run:from_flags")
    options = choose(layout, tenant, split, task, on_error, refusal_file, dry_run=dry_run)
    check_policy = entry("millrace.streams.seal.policy_terms:check_announcement")
    with _progress_bar() as report:
        summaries = entry("millrace.formats.imports:import_files")(settings, files, options, check_policy, report)
    if as_json:
        put_json([one.as_json() for one in summaries])
        return
    for one in summaries:
        _say(one)
    _warn(settings, tenant)


def _say(one: ImportSummary) -> None:
    verb = "imported" if one.sent else "would import"
    calls, rewards = one.events.get("model_call", 0), one.events.get("reward", 0)
    counts = f"{one.trajectories:,} trajectories, {calls:,} model calls, {rewards:,} rewards"
    console.print(f"{verb} {one.file} ({one.layout}): {counts}", highlight=False, markup=False, soft_wrap=True)
    if one.tokens_left_out:
        note = f"  exact tokens of {one.tokens_left_out:,} trajectories were left out: nobody here saw them sampled"
        console.print(note, highlight=False, soft_wrap=True)
    for part, count in one.passed_over.items():
        console.print(f"  passed over: {count:,} x {part}", highlight=False, markup=False, soft_wrap=True)
    for reason, count in one.refused.items():
        console.print(f"  refused as {reason}: {count:,}", highlight=False, markup=False, soft_wrap=True)
    for example in one.examples:
        console.print(f"  {example}", highlight=False, markup=False, soft_wrap=True)


def _warn(settings: Settings, tenant: str) -> None:
    rules = settings.governance.tenants
    if tenant not in rules and "default" not in rules:
        warning = (
            f"tenant {tenant} has no rules, so its content is kept for audit alone: add [governance.tenants.{tenant}]"
        )
        complain.print(warning, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, Path, int, int], None]]:
    """Shows on a terminal how far it is; elsewhere nothing."""
    if not (complain.is_terminal and console.is_terminal):
        yield lambda verb, path, position, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=complain, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(verb: str, path: Path, position: int, total: int) -> None:
            bar.update(task, description=f"{verb} {path.name}", completed=position, total=max(total, 1))

        yield report
