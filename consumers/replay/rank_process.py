"""The process that a rank is.

Invariants: nothing here loads torch before the rank has set its threads; a rank ends with the process that started it,
since its pipe closes then.
"""

from __future__ import annotations

import os
import signal
import traceback
from multiprocessing.connection import Connection

from millrace.consumers.learner.serve import prepare_process
from millrace.consumers.replay.orders import Answer, Done, Failed, Order
from millrace.infra.config import Settings
from millrace.infra.errors import MillraceError


def serve(pipe: Connection, settings: Settings) -> None:
    """The whole life of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who started this process ends it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    prepare_process(settings)
    from millrace.consumers.replay.rank_worker import RankWorker

    worker = RankWorker()
    pipe.send(Done())
    while True:
        try:
            order: Order = pipe.recv()
        except (EOFError, OSError):
            return
        answer: Answer
        try:
            answer = worker.obey(order)
        except MillraceError as error:
            answer = Failed(str(error), meant=True)
        except Exception:
            answer = Failed(traceback.format_exc(), meant=False)
        pipe.send(answer)
