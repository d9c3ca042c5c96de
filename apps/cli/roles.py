"""One command for each role, so that any of them runs alone on a machine of its own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import typer

from millrace.apps.cli.context import become_role, call, entry, in_help

if TYPE_CHECKING:
    from millrace.infra.config import Settings


class Role(NamedTuple):
    """A process: its command, what it does, how many there may be with which settings, and the function that runs it
    until SIGTERM."""

    name: str
    does: str
    many: str
    entry: str

    @property
    def help(self) -> str:
        """The command's help; a list of commands shows its first paragraph."""
        return f"{self.does}\n\n{in_help(self.many)} Ends well on SIGTERM."


ROLES = (
    Role(
        "gateway",
        "Serve agents the OpenAI API and capture every call.",
        "Settings: [gateway], [engine]. Run as many as you like, each with a port and capture_dir of its own.",
        "millrace.producers.gateway.serve:run",
    ),
    Role(
        "otlp",
        "Take spans of model calls from OpenTelemetry, over HTTP.",
        "Settings: [otlp], keys of [gateway]. It takes OTLP/HTTP at /v1/traces and /v1/logs, protobuf or JSON: point "
        "OTEL_EXPORTER_OTLP_ENDPOINT at it, with OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20KEY. Spans of one "
        "conversation become an episode that is kept and can be evaluated, never one that RL trains on. Run one for a "
        "stream of spans: those of one trace belong to the same process.",
        "millrace.producers.intake.otlp.serve:run",
    ),
    Role(
        "refine",
        "Check, redact and admit captured events: raw to events.",
        "Settings: [governance]. Run up to [topics] slots of them; they serve every policy of the namespace.",
        "millrace.streams.serve:run_refine",
    ),
    Role(
        "reward",
        "Judge ended episodes with verifiers.",
        "Settings: [reward]. Run as many as you like.",
        "millrace.streams.reward.serve:run",
    ),
    Role(
        "seal",
        "Join events and rewards to trajectories, samples to groups.",
        "Run up to [topics] slots of them; they serve every policy of the namespace.",
        "millrace.streams.serve:run_seal",
    ),
    Role(
        "dispatch",
        "Grant prompts and order ready groups, within the staleness bound.",
        "Settings: [policy]. One works, a second one stands by.",
        "millrace.streams.serve:run_dispatch",
    ),
    Role(
        "learn",
        "Train versions; start more of them to train faster.",
        "Settings: [learner]. Run up to [topics] shards of them; each has its share at the next step.",
        "millrace.consumers.learner.serve:run",
    ),
    Role(
        "reload",
        "Keep the engine on the newest version.",
        "Settings: [engine]. Run one beside each engine, which [engine] url names.",
        "millrace.consumers.reloader.serve:run",
    ),
    Role(
        "rollout",
        "Run your agent on granted prompts.",
        "Settings: [rollout]. Run as many as you like.",
        "millrace.producers.rollout.serve:run",
    ),
    Role(
        "warehouse",
        "Bring the log into tables that SQL reads, and answer queries.",
        "Settings: [warehouse]. One process holds a directory; it serves every policy of the namespace.",
        "millrace.consumers.warehouse.serve:run",
    ),
    Role(
        "archive",
        "Keep closed ranges of topics as Parquet files, so that retention can be short.",
        "Settings: [archive]. Run one; audit, replay and exports read topics and archive as one history.",
        "millrace.consumers.archive:run",
    ),
    Role(
        "broker",
        "Run one local Kafka broker.",
        "Settings: [kafka]. For one machine; for more use a cluster of your own.",
        "millrace.infra.machine.local:run_broker",
    ),
    Role(
        "engine",
        "Run one local inference engine on the newest version.",
        "Settings: [engine]. It listens where [engine] url says; a `reload` belongs beside it, which `engine join` "
        "brings.",
        "millrace.infra.machine.local:run_engine",
    ),
)


NAMES = tuple(role.name for role in ROLES)
GROUPS = {
    "archive": "millrace.apps.cli.archive:COMMANDS",
    "warehouse": "millrace.apps.cli.warehouse:COMMANDS",
    "engine": "millrace.apps.cli.engines:COMMANDS",
}
"""roles whose commands have commands of their own"""
SERVING = ("gateway", "otlp", "warehouse")
"""roles that answer over HTTP"""
CHOOSING = ("dispatch", "learn")
"""roles that settle what a group is, and what is learned from it"""


def program(name: str) -> Callable[[typer.Context], None] | typer.Typer:
    """What a role's command is: a function, or a group whose own command it is."""
    role = ROLES[NAMES.index(name)]
    if name not in GROUPS:
        return command(role)
    module, _, table = GROUPS[name].partition(":")
    return group(role, getattr(importlib.import_module(module), table))


def command(role: Role) -> Callable[[typer.Context], None]:
    """The function behind a role's command."""

    def run(context: typer.Context) -> None:
        settings = call(context).settings()
        start(role, settings)

    run.__doc__ = role.help
    return run


def group(role: Role, commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    """The role as a command with commands of its own."""
    app = typer.Typer(help=role.help, invoke_without_command=True)
    run = command(role)

    @app.callback()
    def alone(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            run(context)

    for name, function in commands.items():
        app.command(name)(function)
    return app


def start(role: Role, settings: Settings) -> None:
    """Run a role in this process. Workers that a killed incarnation of the same supervised process left are ended
    first: they hold its memory, and some its ports. Raises ConfigError for settings that contradict each other."""
    from millrace.apps.agreement import check_agreement
    from millrace.infra import telemetry_setup
    from millrace.infra.local_keys import make_home
    from millrace.infra.machine import leftovers
    from millrace.infra.machine.supervisor import Supervisor
    from millrace.infra.process.ending import end

    if role.name in CHOOSING:
        check_agreement(settings)
    name = os.environ.get(leftovers.ROLE) or role.name
    become_role(name)
    make_home(settings.home)
    deployment = os.environ.get(leftovers.DEPLOYMENT)
    if deployment and leftovers.ROLE in os.environ:
        supervisor = Supervisor(settings.home, deployment)
        leftovers.stop(leftovers.find(deployment, name, programs=supervisor.pids), grace_s=2)
    telemetry_setup.setup(settings, role.name)
    entry(role.entry)(settings)
    if role.name in SERVING:
        end()
