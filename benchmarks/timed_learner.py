"""A learner that writes down, in a file of the folder $TIMES, when it passed which state: [seconds, state] a line."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

from millrace.consumers.learner.serve import run
from millrace.infra.config import load


def main() -> None:
    """Learn, as `millrace learn` does."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with (Path(os.environ["TIMES"]) / str(os.getpid())).open("a", buffering=1) as out:

        def at(name: str) -> None:
            out.write(json.dumps([time.time(), name]) + "\n")

        at("started")
        run(load(), on_phase=at)


if __name__ == "__main__":
    main()
