"""One command for each role, so that any of them runs alone on a machine of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import typer

from infra import telemetry
from infra.cli.context import become_role, call, entry
from infra.config import Settings
from infra.services import leftovers


class Role(NamedTuple):
    """A process: its command, what it does, and the function that runs it until SIGTERM."""

    name: str
    help: str
    entry: str


ROLES = (
    Role("gateway", "Serve agents the OpenAI API and capture every call.", "producers.gateway.serve:run"),
    Role("refine", "Check, redact and admit captured events: raw to events.", "streams.serve:run_refine"),
    Role("reward", "Judge ended episodes with verifiers.", "streams.reward.serve:run"),
    Role("seal", "Join events and rewards to trajectories, samples to groups.", "streams.serve:run_seal"),
    Role("dispatch", "Grant prompts and order ready groups, within the staleness bound.", "streams.serve:run_dispatch"),
    Role("learn", "Train versions; start more of them to train faster.", "consumers.learner.serve:run"),
    Role("reload", "Keep the engine on the newest version.", "consumers.reloader.serve:run"),
    Role("rollout", "Run your agent on granted prompts.", "producers.rollout.serve:run"),
    Role("broker", "Run one local Kafka broker.", "infra.services.local:run_broker"),
    Role("engine", "Run one local inference engine on the newest version.", "infra.services.local:run_engine"),
)


def command(role: Role) -> Callable[[typer.Context], None]:
    """The function behind a role's command."""

    def run(context: typer.Context) -> None:
        settings = call(context).settings()
        start(role, settings)

    return run


def start(role: Role, settings: Settings) -> None:
    """Run a role in this process. Workers that a killed incarnation of the same supervised process left are ended
    first: they hold its memory, and some its ports."""
    name = os.environ.get(leftovers.ROLE) or role.name
    become_role(name)
    deployment = os.environ.get(leftovers.DEPLOYMENT)
    if deployment and leftovers.ROLE in os.environ:
        leftovers.stop(leftovers.find(deployment, name), grace_s=2)
    telemetry.setup(settings, role.name)
    entry(role.entry)(settings)
