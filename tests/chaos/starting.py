"""A deployment that is being made, as far as power cuts can hurt it: keys, broker, topics, version 0; then records.

    python -m tests.chaos.starting SETTINGS MODEL

Prints one line for each step that is done, then the number of each record that the broker acknowledged: 0, 1, 2, ...
Started again it goes on where the log ends.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

from millrace.consumers import policy_names, version_zero
from millrace.infra.config import Settings, load
from millrace.infra.connect import connect
from millrace.infra.errors import PolicyError
from millrace.infra.log.base import Outgoing
from millrace.infra.log.history.newest import head
from millrace.infra.machine.deployment import Deployment
from millrace.infra.machine.programs import BROKER
from millrace.infra.process.net import wait_until

STEPS = ("topics", "policy")


def topic(settings: Settings) -> str:
    """Where the records go: one that has a single partition."""
    return policy_names.topics(settings)["completions"]


def main(file: Path, model: Path) -> None:
    """Bring it up, and write until killed."""
    settings = load(file)
    deployment = Deployment(settings, {"MILLRACE_CONFIG": str(file)})
    deployment.programs = [program for program in deployment.programs if program.name == BROKER]
    deployment.up()
    print(STEPS[0], flush=True)
    names = policy_names.topics(settings)
    with connect(settings) as bus:
        if head(bus, names["weights"], names["ledger"]) is None:
            # The broker may only now show what it had decided before the cut: then version 0 is there.
            with suppress(PolicyError):
                version_zero.create(settings, model, bus)
            wait_until(lambda: head(bus, names["weights"], names["ledger"]) is not None, "version 0", 60)
        print(STEPS[1], flush=True)
        publisher = bus.publisher()
        for number in count(bus.ends(topic(settings))[0]):
            publisher.publish(Outgoing(topic(settings), b"", str(number).encode(), partition=0)).result(60)
            print(number, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
