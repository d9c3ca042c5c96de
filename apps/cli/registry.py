"""`millrace registry add`, `list` and `remove`: whose identifiers refine takes out of a tenant's traffic."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from millrace.apps.cli.context import call, console, entry
from millrace.infra.config import Settings
from millrace.infra.errors import ConfigError

registry = typer.Typer(no_args_is_help=True, help="The subjects of a tenant, whose identifiers are taken out.")
TENANT = Annotated[str, typer.Argument(metavar="TENANT", help="as [governance.tenants] calls it")]


def _place(settings: Settings, tenant: str) -> Path:
    rule = settings.governance.tenants.get(tenant)
    if rule is None or not rule.identifiers:
        raise ConfigError(
            f"tenant {tenant} has no registry: under [governance.tenants.{tenant}] set identifiers to a file's name, "
            f'such as "{tenant}.registry"'
        )
    return settings.home / rule.identifiers


def _subjects(path: Path, key: bytes) -> dict[str, list[str]]:
    return dict(entry("millrace.streams.refine.subjects.store:read")(path, key)) if path.exists() else {}


def _key(settings: Settings) -> bytes:
    return bytes(entry("millrace.streams.refine.subjects.store:key_in")(settings.home))


@registry.command("add")
def add(
    context: typer.Context,
    tenant: TENANT,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="CSV; without it, what comes in")] = None,
) -> None:
    """Add identifiers: a line `subject,identifier,identifier,...` for each subject, as CSV. Refine takes them up at
    once.

    Example: echo 's-17,Ana Example,ana@example.org,+49 30 901820' | millrace registry add acme
    """
    settings = call(context).settings()
    path, key = _place(settings, tenant), _key(settings)
    text = sys.stdin.read() if file is None else file.read_text()
    subjects = _subjects(path, key)
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        subject, *identifiers = row or [""]
        if subject:
            subjects[subject] = list(dict.fromkeys([*subjects.get(subject, []), *filter(None, identifiers)]))
    entry("millrace.streams.refine.subjects.store:write")(path, key, subjects)
    console.print(f"{len(subjects)} subjects of {tenant} are known", highlight=False)


@registry.command("list")
def list_(context: typer.Context, tenant: TENANT) -> None:
    """The subjects of a tenant, and how many identifiers each has. The identifiers themselves are not shown."""
    settings = call(context).settings()
    for subject, identifiers in sorted(_subjects(_place(settings, tenant), _key(settings)).items()):
        console.print(f"{subject} {len(identifiers)}", highlight=False, markup=False)


@registry.command("remove")
def remove(
    context: typer.Context, tenant: TENANT, names: Annotated[list[str], typer.Argument(metavar="SUBJECT...")]
) -> None:
    """Forget subjects and their identifiers. What was taken out of the log stays out."""
    settings = call(context).settings()
    path, key = _place(settings, tenant), _key(settings)
    subjects = {name: values for name, values in _subjects(path, key).items() if name not in names}
    entry("millrace.streams.refine.subjects.store:write")(path, key, subjects)
    console.print(f"{len(subjects)} subjects of {tenant} are known", highlight=False)
