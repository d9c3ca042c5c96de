"""Commands for settings and storage: init, config, doctor, topics, sweep."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from infra.cli.context import call, console
from infra.config import FILE, masked
from infra.errors import ConfigError
from infra.topics import NAME

SIGNS = {"ok": "[green]✓[/]", "warning": "[yellow]![/]", "bad": "[bold red]✗[/]"}


def init(
    namespace: Annotated[str, typer.Option(help="name of the deployment, in front of every topic")] = "dev",
    policy: Annotated[str, typer.Option(help="name of the model to train")] = "policy",
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
) -> None:
    """Write a commented millrace.toml with every setting and its default."""
    from infra.cli.template import render

    for flag, name in (("--namespace", namespace), ("--policy", policy)):
        if not NAME.fullmatch(name):
            raise ConfigError(f"{flag} {name!r}: up to 63 letters, digits, '-' and '_', a letter or digit first")
    path = Path(FILE)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: edit it, or replace it with --force")
    # Keys may be written into it later.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(render(namespace, policy))
    console.print(f"wrote {path}: edit it, then `millrace doctor`, then `millrace up`", highlight=False, soft_wrap=True)


def config(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of TOML")] = False,
) -> None:
    """Show the effective settings, secrets masked."""
    import tomlkit

    values = masked(call(context).settings())
    typer.echo(json.dumps(values, indent=2) if as_json else tomlkit.dumps(values).rstrip())


def doctor(context: typer.Context) -> None:
    """Check what a deployment needs: packages, disk, storage, broker, topics, clocks, engine, gateway."""
    from infra.doctor import examine

    bad = 0
    for answer in examine(call(context).settings()):
        bad += answer.word == "bad"
        console.print(f"{SIGNS[answer.word]} {answer.question}: ", end="")
        console.print(answer.said, markup=False, highlight=False, soft_wrap=True)
    if bad:
        raise typer.Exit(1)


def sweep(
    context: typer.Context,
    hours: Annotated[float, typer.Option(min=0, help="leave alone what was stored within so many hours")] = 24,
) -> None:
    """Delete bodies of large records that no record of the namespace refers to any more."""
    from infra.bus.connect import connect
    from infra.claims import ClaimStore
    from infra.sweep import sweep as swept

    settings = call(context).settings()
    with connect(settings) as bus:
        found = swept(bus, settings.namespace, ClaimStore(settings.claims), hours * 3600)
    console.print(
        f"{settings.claims}: {found.removed} of {found.looked_at} older bodies removed, {found.bytes} bytes",
        highlight=False,
        soft_wrap=True,
    )


def topics(
    context: typer.Context,
    check: Annotated[bool, typer.Option("--check", help="only compare, create nothing")] = False,
) -> None:
    """Create the topics that are missing and check those that exist."""
    from infra.bus.connect import connect

    settings = call(context).settings()
    with connect(settings) as bus:
        (bus.check_topics if check else bus.ensure_topics)(settings.layout.specs())
        table = Table(Column("topic", no_wrap=True), "key", "partitions", "kept", "what", box=None, pad_edge=False)
        for row, spec in settings.layout.topics():
            hours = int(spec.config.get("retention.ms", "-1")) // 3_600_000
            kept = "newest per key" if row.cleanup == "compact" else f"{hours} h" if hours > 0 else "for ever"
            table.add_row(spec.name, row.key, str(spec.partitions), kept, row.what)
    console.print(table)
