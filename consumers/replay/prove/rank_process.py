"""The process of a rank: it obeys orders, each a call of its `RankWorker`, and answers what the call gives.

Invariants: nothing here loads torch before the rank has set its threads; a rank ends with the process that started it,
since its pipe closes then.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

from millrace.consumers.learner.serve import prepare_process
from millrace.infra.config import Settings
from millrace.infra.errors import MillraceError


class Failure(NamedTuple):
    """What a rank raised: its message where the error says what to do (`is_meant`), else its trace."""

    text: str
    is_meant: bool


def serve(pipe: Connection, settings: Settings) -> None:
    """The whole life of a rank's process. It answers None once it is ready for orders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who started this process ends it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    prepare_process(settings)
    from millrace.consumers.replay.prove.rank_worker import RankWorker

    worker = RankWorker()
    pipe.send(None)
    while True:
        try:
            order: Callable[[RankWorker], object] = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = order(worker)
        except MillraceError as error:
            answer = Failure(str(error), is_meant=True)
        except Exception:
            answer = Failure(traceback.format_exc(), is_meant=False)
        pipe.send(answer)
