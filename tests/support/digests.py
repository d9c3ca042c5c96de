"""What seeded histories come to, as one digest: a change that must alter no record leaves it as it is.

python -m tests.support.digests 50      # every record of every topic of seeds 0 to 49, changelogs and turns too
"""

from __future__ import annotations

import hashlib
import logging
import sys

from millrace.testing.world import World
from tests.support.histories import run
from tests.support.players import Plan


def digest_of(seed: int) -> str:
    """sha256 over topic, partition, offset, key, value and headers of every record that a seeded history wrote."""
    digest = hashlib.sha256()

    def inspect(world: World, plan: Plan) -> None:
        for topic in sorted(world.bus.logs):
            for partition in range(world.bus.partitions(topic)):
                for record in world.bus.read(topic, partition):
                    where = (topic, partition, record.offset)
                    digest.update(repr((*where, record.key, record.value, sorted(record.headers.items()))).encode())

    run(seed, inspect=inspect)
    return digest.hexdigest()


def main(count: int) -> str:
    """One digest over the seeds below `count`."""
    logging.disable(logging.WARNING)
    return hashlib.sha256("".join(digest_of(seed) for seed in range(count)).encode()).hexdigest()


if __name__ == "__main__":
    print(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
