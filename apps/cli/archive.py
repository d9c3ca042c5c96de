"""`millrace archive`: closed ranges of topics as Parquet files, read as one history with the topics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec
import typer
from rich.table import Column

from millrace.apps.cli.context import call, console
from millrace.infra.terminal import RowTable, put_json


def once(context: typer.Context) -> None:
    """Archive all that is written now, however young, and end. Good before a deployment is taken down."""
    from millrace.consumers.archive import once as archive_now
    from millrace.consumers.archive import segment_text
    from millrace.infra.connect import connect_now

    settings = call(context).settings()
    segments = records = 0
    with connect_now(settings) as bus:
        for segment in archive_now(settings, bus):
            segments, records = segments + 1, records + segment.segment.records
            console.print(
                f"{segment.topic}/{segment.partition} {segment_text(segment)}", highlight=False, soft_wrap=True
            )
    console.print(f"{segments} segments, {records} records -> {settings.archive_root}", highlight=False, soft_wrap=True)


def list_(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False
) -> None:
    """Say which ranges of which topics are archived, and what was gone before it could be."""
    from millrace.consumers.archive import shelves

    settings = call(context).settings()
    inventory = list(shelves(settings))
    if as_json:
        put_json([msgspec.to_builtins(shelf) for shelf in inventory])
        return
    table = RowTable(
        Column("partition", no_wrap=True), "from", "to", "records", "bytes", "first", "last", "lost", box=None
    )
    for shelf in inventory:
        segments = shelf.segments
        table.add_row(
            f"{shelf.topic}/{shelf.partition}",
            str(segments[0].first),
            str(segments[-1].end - 1),
            f"{sum(one.records for one in segments):,}",
            f"{sum(one.size for one in segments):,}",
            _day(min(one.since for one in segments)),
            _day(max(one.until for one in segments)),
            ", ".join(f"{lo} to {hi - 1}" for lo, hi in shelf.holes()),
        )
    console.print(table if inventory else f"nothing is archived in {settings.archive_root}", soft_wrap=not inventory)


def verify(context: typer.Context) -> None:
    """Read every archived record and compare it with its digest. Exit code 1 names the segment that is damaged."""
    from millrace.consumers.archive import shelves
    from millrace.consumers.archive import verify as verified

    settings = call(context).settings()
    records = size = 0
    for shelf in shelves(settings):
        total = verified(settings, shelf)
        records, size = records + total.records, size + total.size
    console.print(f"whole: {records:,} records in {size:,} bytes", highlight=False)


def _day(micros: int) -> str:
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M")


COMMANDS = {"once": once, "list": list_, "verify": verify}
"""of the role, by name"""
