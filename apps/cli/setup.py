"""Commands for settings and storage: init, config, check, doctor, topics, sweep."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column

from millrace.apps.cli.context import call, console
from millrace.infra.config import FILE, Settings, mask_values
from millrace.infra.errors import ConfigError
from millrace.infra.log.topics import NAME
from millrace.infra.terminal import RowTable, put, put_json
from millrace.schemas.json_values import Json, JsonObject

if TYPE_CHECKING:
    from millrace.apps.answers import Answer

SIGNS = {"ok": "[green]✓[/]", "warning": "[yellow]![/]", "bad": "[bold red]✗[/]"}


def init(
    namespace: Annotated[str, typer.Option(help="name of the deployment, in front of every topic")] = "dev",
    policy: Annotated[str, typer.Option(help="name of the model to train")] = "policy",
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
) -> None:
    """Write a commented millrace.toml with every setting and its default."""
    from millrace.apps.cli.template import render

    for flag, name in (("--namespace", namespace), ("--policy", policy)):
        if not NAME.fullmatch(name):
            raise ConfigError(f"{flag} {name!r}: up to 63 letters, digits, '-' and '_', a letter or digit first")
    path = Path(FILE)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: edit it, or replace it with --force")
    # Keys may be written into it later.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(render(namespace, policy, addresses := _free_addresses()))
    for key, value in addresses.items():
        console.print(f"another program uses the port of {key}, so this one is {value}", highlight=False)
    console.print(f"wrote {path}: edit it, then `millrace check`, then `millrace up`", highlight=False, soft_wrap=True)


def _free_addresses() -> JsonObject:
    """Addresses in place of those defaults that are in use here, by setting."""
    from millrace.infra.machine.deployment import ports
    from millrace.infra.process.net import LOCALHOST, free_ports, is_listening

    busy = [key for key, port in ports(Settings()).items() if is_listening(LOCALHOST, port)]
    form: dict[str, Callable[[int], Json]] = {
        "gateway.port": int,
        "warehouse.port": int,
        "kafka.bootstrap": lambda port: f"{LOCALHOST}:{port}",
        "engine.url": lambda port: f"http://{LOCALHOST}:{port}",
    }
    return {key: form[key](port) for key, port in zip(busy, free_ports(len(busy)), strict=True)}


def config(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of TOML")] = False,
) -> None:
    """Show the effective settings, secrets masked."""
    import tomlkit

    values = mask_values(call(context).settings())
    if as_json:
        put_json(values)
    else:
        put(tomlkit.dumps(values).rstrip())


def doctor(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False
) -> None:
    """Check what a deployment needs: settings, packages, disk, storage, broker, ports, topics, clocks, engine, gateway,
    and your own code, as `check` does."""
    from millrace.apps.doctor import examine

    _answer(examine(call(context).settings(), call(context).path), as_json)


def check(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False
) -> None:
    """Load the settings and what they name of yours (agent, verifier, tasks, algorithm), and say what is wrong with
    them before anything starts. Needs no broker."""
    from millrace.apps.check import check as examine

    _answer(examine(call(context).settings()), as_json)


def _answer(answers: Iterable[Answer], as_json: bool) -> None:
    """Show answers as they come, or all as JSON. Exit code 1 when one of them is bad."""
    every = []
    for answer in answers:
        every.append(answer)
        if not as_json:
            console.print(f"{SIGNS[answer.word]} {answer.question}: ", end="")
            console.print(answer.said, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        put_json([asdict(answer) for answer in every])
    if any(answer.word == "bad" for answer in every):
        raise typer.Exit(1)


def sweep(
    context: typer.Context,
    hours: Annotated[float, typer.Option(min=0, help="leave alone what was stored within so many hours")] = 24,
) -> None:
    """Delete bodies of large records that no record of the namespace refers to any more."""
    from millrace.infra.connect import connect
    from millrace.infra.log.blobs import ClaimStore
    from millrace.infra.log.sweep import sweep as swept

    settings = call(context).settings()
    with connect(settings) as bus:
        summary = swept(bus, settings.namespace, ClaimStore(settings.claims), hours * 3600)
    console.print(
        f"{settings.claims}: {summary.removed} of {summary.looked_at} older bodies removed, {summary.bytes} bytes",
        highlight=False,
        soft_wrap=True,
    )


def topics(
    context: typer.Context,
    check: Annotated[bool, typer.Option("--check", help="only compare, create nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Create the topics that are missing and check those that exist."""
    from millrace.infra.connect import connect

    settings = call(context).settings()
    with connect(settings) as bus:
        (bus.check_topics if check else bus.ensure_topics)(settings.layout.specs())
        if as_json:
            rows = [
                {"topic": spec.name, "key": row.key, "partitions": spec.partitions, "config": dict(spec.config)}
                | {"what": row.what}
                for row, spec in settings.layout.topics()
            ]
            put_json(rows)
            return
        table = RowTable(Column("topic", no_wrap=True), "key", "partitions", "kept", "what", box=None, pad_edge=False)
        for row, spec in settings.layout.topics():
            hours = int(spec.config.get("retention.ms", "-1")) // 3_600_000
            retention = "newest per key" if row.cleanup == "compact" else f"{hours} h" if hours > 0 else "for ever"
            table.add_row(spec.name, row.key, str(spec.partitions), retention, row.what)
    console.print(table)
