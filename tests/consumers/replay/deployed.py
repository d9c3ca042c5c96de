"""A policy with a history on a real broker, and the variables under which commands find it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from millrace.infra.config import Settings
from millrace.infra.log.base import Bus
from millrace.infra.log.history.kinds import WEIGHTS
from millrace.infra.log.history.reader import History
from millrace.infra.log.kafka.bus import KafkaBus
from tests.support.branches import play
from tests.support.feed import settings_for, start_policy

SIZE, GROUPS = 4, 120
FLAGS = {"policy.group_size": SIZE, "kafka.local": False}
PROGRAM = "import sys\nfrom millrace.apps.cli.main import app\nsys.argv[1:] = {words!r}\napp()\n"
SHORT = ["--from-version", "0", "--steps", "5", "--save-every", "2", "--lr", "3e-4", "--batch", "16", "--device", "cpu"]
"""of a branch that takes a moment"""
VERIFIER = "def strict(task, output, episode):\n    return {'value': 1 - float(output)}\n"


class Deployed(NamedTuple):
    """A policy with a history, and the variables under which commands find it."""

    settings: Settings
    bus: Bus
    variables: dict[str, str]


@contextmanager
def deploy(broker: str, model: Path, folder: Path) -> Iterator[Deployed]:
    """A policy of that model, whose replies are in the log, `SIZE` in each of `GROUPS` groups."""
    settings, file = settings_for(folder, broker, f"b{uuid.uuid4().hex[:8]}", **FLAGS)
    variables = {"CONFIG": str(file), "POLICY__GROUP_SIZE": str(SIZE), "KAFKA__LOCAL": "false"}
    with KafkaBus(broker) as bus:
        start_policy(settings, bus, folder, model=model)
        play(bus, settings, model, range(GROUPS), size=SIZE)
        yield Deployed(settings, bus, {f"MILLRACE_{name}": value for name, value in variables.items()})


def weights(it: Deployed, name: str) -> list[tuple[int, str]]:
    """Version and digest of every weight event of a branch, committed ones only, in the order of the log."""
    rows = History(it.bus, it.settings.namespace, name).rows(WEIGHTS)
    return [(row["version"], row["digest"]) for row in rows]
