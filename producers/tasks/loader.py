"""Keeps a bounded number of unresolved prompts ahead in `<policy>.prompts`.

Invariants: prompt numbers are dense, each is written exactly once: one transactional id for the policy, so a second
loader fences the first, and a new one continues from the topic's own end; prompt `n` is task `n mod len` of epoch
`n div len`, so nothing else need be remembered."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable

from millrace.infra import faults
from millrace.infra.errors import BusError, ConfigError, FencedError
from millrace.infra.log.base import Bus, Outgoing, Transactor
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.follow import Follower
from millrace.infra.log.history.kinds import PROMPTS, RESOLUTIONS
from millrace.infra.log.history.reader import History
from millrace.infra.log.history.rows import Row, as_stored
from millrace.infra.log.topics import full_name
from millrace.producers.tasks.source import TaskSource
from millrace.schemas import codec
from millrace.schemas.limits import beyond
from millrace.schemas.records import Prompt, Resolution

logger = logging.getLogger(__name__)

BATCH = 64
IDLE_S = 0.2


class Loader:
    """One loader of one policy. `step` does one round; use it from one thread."""

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        policy: str,
        source: TaskSource,
        *,
        ahead: int,
        epochs: int = 0,
        claims: ClaimStore | None = None,
    ) -> None:
        self._claims = claims
        self.policy = policy
        self.source = source
        self.ahead = ahead
        self.epochs = epochs
        self._prompts = full_name(namespace, f"{policy}.prompts")
        # The fence first: from here on nobody else adds a prompt, so the end that is read next is the end.
        self._transactor: Transactor = bus.transactor(f"{namespace}.{policy}.loader")
        faults.point("loader.fenced")
        self.number = 0
        self.unresolved: Counter[str] = Counter()
        """how many prompts of each id; tasks may share theirs"""
        resolve = as_stored if claims is None else claims.resolve
        history = History(bus, namespace, policy, resolve, is_bounded=True)
        # Dispatch answers what is no prompt with a dead letter: nothing waits for it.
        for prompt in history.rows(PROMPTS):
            self.number = prompt["number"] + 1
            self.unresolved[prompt["id"]] += 1
        self._resolutions = Follower(history, [RESOLUTIONS])
        for row in self._resolutions.catch_up():
            self._settle(row)

    @property
    def is_done(self) -> bool:
        """Whether every epoch was handed out."""
        return bool(self.epochs) and self.number >= self.epochs * len(self.source)

    def step(self, timeout_s: float = IDLE_S) -> int:
        """Take in what was resolved and write what is missing ahead; returns how many prompts were written."""
        for row in self._resolutions.poll(timeout_s):
            self._settle(row)
        count = min(self.ahead - self.unresolved.total(), BATCH)
        if self.epochs:
            count = min(count, self.epochs * len(self.source) - self.number)
        if count <= 0:
            return 0
        self._transactor.begin()
        ids = []
        for number in range(self.number, self.number + count):
            epoch, index = divmod(number, len(self.source))
            id = self.source.id(index, epoch)
            prompt: Prompt = {
                "id": id,
                "policy": self.policy,
                "number": number,
                "task": json.dumps(self.source.task(index), ensure_ascii=False),
                "group_size": None,
                "awaits": [],
            }
            fault = beyond("Prompt", prompt)
            if fault is not None:
                raise ConfigError(f"task {index + 1} of {len(self.source)} cannot be handed out: {fault}")
            value = codec.encode("Prompt", prompt)
            fitting = value if self._claims is None else self._claims.fitting("Prompt", value)
            self._transactor.send(Outgoing(self._prompts, id.encode(), fitting))
            ids.append(id)
        faults.point("loader.sent")
        self._transactor.commit({}, None)
        faults.point("loader.committed")
        self.number += count
        self.unresolved.update(ids)
        return count

    def close(self) -> None:
        """Let go of the log. Idempotent."""
        self._transactor.close()
        self._resolutions.close()

    def _settle(self, resolution: Row[Resolution]) -> None:
        """One prompt of this id less is waited for."""
        if (id := resolution["prompt_id"]) is None:
            return
        if self.unresolved[id] > 1:
            self.unresolved[id] -= 1
        else:
            self.unresolved.pop(id, None)


class LoaderThread:
    """Runs a loader while it is wanted: `start` and `stop` may alternate."""

    def __init__(self, make: Callable[[], Loader]) -> None:
        self._make = make
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failed: Exception | None = None
        """what ended the thread; whoever started it raises it"""

    def start(self) -> None:
        """Begin, unless it runs."""
        if self._thread is None:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name="task-loader", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End it. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            loader = None
            try:
                loader = self._make()
                while not stop.is_set() and not loader.is_done:
                    loader.step()
                if loader.is_done:
                    logger.info("every task was handed out %d times", loader.epochs)
                    return
            except FencedError:
                logger.info("another worker loads the tasks now")
                stop.wait(5.0)
            except BusError as error:
                logger.warning("the task loader starts again in 1 s: %s", error)
                stop.wait(1.0)
            except Exception as error:
                self.failed = error
                return
            finally:
                if loader is not None:
                    loader.close()
