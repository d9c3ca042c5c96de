"""`millrace export`: sealed trajectories as files that other tools read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from millrace.apps.cli.context import call, complain, console, entry
from millrace.apps.cli.selecting import AcceptGaps
from millrace.infra.terminal import put_json

LAYOUTS = (
    "jsonl, parquet, hf (exact tokens); trl, trl-messages, trl-preference; openai, openai-preference; prime-rl, verl, "
    "atropos, verifiers"
)
Many = list[str] | None


def export(
    context: typer.Context,
    layout: Annotated[str, typer.Option(help=f"how to write: {LAYOUTS}")],
    out: Annotated[Path, typer.Option("--out", "-o", help="file to write, or directory for hf; must not be there yet")],
    policy: Annotated[str, typer.Option(help="whose trajectories; default: the policy of the settings")] = "",
    version: Annotated[str, typer.Option(metavar="A..B", help="only with tokens sampled by these versions")] = "",
    training_range: Annotated[
        str, typer.Option("--trained", metavar="A..B", help="only what trained these versions")
    ] = "",
    task: Annotated[Many, typer.Option(help="only this task; may be repeated")] = None,
    tenant: Annotated[Many, typer.Option(help="only of this tenant; may be repeated")] = None,
    split: Annotated[
        str, typer.Option(help="train, evaluation or all; evaluation traffic leaves only when it is asked for")
    ] = "train",
    reward: Annotated[
        Many, typer.Option(metavar="BOUND", help="only with such a reward, as '>=0.5'; may be repeated")
    ] = None,
    status: Annotated[
        Many, typer.Option(help="only ended so: completed, failed, truncated, aborted, abandoned; may be repeated")
    ] = None,
    best_of_group: Annotated[
        bool, typer.Option("--best-of-group", help="of each group only the sample with the highest reward")
    ] = False,
    accept_gaps: AcceptGaps = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the manifest as JSON")] = False,
) -> None:
    """Write sealed trajectories in a layout that other tools read, with a manifest beside them.

    Content that is denied or kept for audit never leaves. What a layout cannot say is refused by name and counted.

    Example: millrace export --layout trl -o best.jsonl --reward '>=0.9' --best-of-group
    """
    flags = call(context)
    if policy:
        flags.flags["policy.name"] = policy
    select = entry("millrace.formats.exports.select:from_flags")
    selection = select(
        version, training_range, task or [], tenant or [], split, reward or [], status or [], best=best_of_group
    )
    settings = flags.settings()
    rules = entry("millrace.consumers.clearance:today")(settings)
    with _progress_bar() as watch:
        summary = entry("millrace.formats.exports:export")(
            settings, layout, out, selection, rules, watch, accept_gaps=accept_gaps
        )
    if as_json:
        put_json(summary.as_json())
        return
    counts = f"{summary.exported:,} of {summary.read:,} trajectories in {summary.rows:,} rows"
    console.print(f"wrote {out}: {counts}, {summary.tokens:,} tokens", highlight=False, soft_wrap=True)
    for gap in summary.gone:
        console.print(f"  {gap}", highlight=False, markup=False, soft_wrap=True)
    for rule, count in summary.left_out.items():
        console.print(f"  left out by {rule}: {count:,}", highlight=False)
    for reason, count in summary.refused.items():
        first = summary.examples[reason][0]
        console.print(f"  refused as {reason}: {count:,}, for instance {first}", highlight=False, markup=False)


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Shows on a terminal how far it is; elsewhere nothing."""
    if not (complain.is_terminal and console.is_terminal):
        yield lambda position, total: None
        return
    columns = (TextColumn("exporting"), BarColumn(bar_width=30), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=complain, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda position, total: bar.update(task, completed=position, total=max(total, 1))
