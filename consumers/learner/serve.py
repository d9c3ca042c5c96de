"""The process `millrace learn`: one member of the policy's learner group.

Before it loads torch it waits for its policy, refuses to differ from the learners that run, and lets them finish the
version they are at: to load torch and the model's code takes seconds of processor, which on few cores would come out of
the step of those that go on after a learner died. Invariant: what waits there has not joined the group, so it costs the
others nothing."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from millrace.consumers import policy_names
from millrace.consumers.learner.group import layouts
from millrace.consumers.learner.group.agreement import address
from millrace.consumers.learner.group.identity import identify, tag_differences, tag_of
from millrace.consumers.learner.group.membership import refuses
from millrace.consumers.learner.version.metrics import line, measure
from millrace.infra.config import Settings, is_local
from millrace.infra.connect import connect
from millrace.infra.errors import RefusedMember
from millrace.infra.heartbeat import BeatPace, Heartbeat, Standing
from millrace.infra.log.base import Bus
from millrace.infra.log.history import newest
from millrace.infra.log.newest import newest_first
from millrace.infra.log.readable import readable
from millrace.infra.terminal import Terminal
from millrace.schemas.records import LedgerEntry, Resolution
from millrace.trainers.tracking import services

log = logging.getLogger(__name__)

PACE = BeatPace(beat_s=5.0, lives_s=15.0, quiet_s=1.0, farewell_s=15.0)
"""of the status in `workers`: versions may follow each other fast"""
PATIENCE_S = 30.0
"""longest that a learner waits at its end for the log to take its last status"""


def run(settings: Settings, *, on_phase: Callable[[str], None] = lambda _: None) -> None:
    """Learn until SIGTERM, SIGINT or `max_versions`. Raises RefusedMember when this learner differs from the others."""
    stop = _Stop()
    with connect(settings) as bus:
        _serve(settings, bus, stop, on_phase)


class _Stop:
    """Set by SIGTERM and SIGINT; looked at between steps."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def __call__(self) -> bool:
        return self.asked


def _serve(settings: Settings, bus: Bus, stop: _Stop, on_phase: Callable[[str], None]) -> None:
    services.check(settings.learner.trackers)
    await_policy(settings, bus, stop)
    if stop.asked:
        return
    if check_peers(settings, bus) >= layouts.need_of(settings.learner).fewest:
        let_commit(settings, bus, stop)
    prepare_process(settings)

    # torch takes seconds to import: after everything that can refuse to start.
    from millrace.consumers.learner.build import build
    from millrace.consumers.learner.group.watch import Watchdog
    from millrace.consumers.learner.learner import Learner
    from millrace.consumers.learner.step.parts import LearnerObserver
    from millrace.consumers.learner.version.metrics import Tracking

    parts = build(settings, bus, stopping=stop)
    heartbeat = Heartbeat(
        bus,
        settings.namespace,
        worker=f"learner-{socket.gethostname()}-{os.getpid()}",
        role="learner",
        policy=settings.policy.name,
        url=parts.url,
        standing=partial(Standing, "starting"),
        pace=PACE,
    )
    heartbeat.start()
    watchdog = Watchdog(bus, parts.group, parts.backend.abort)
    tracking = Tracking.of(settings, bus, parts.topics["ledger"])
    screen = LearnerScreen(settings.policy.name, settings.learner.max_versions, Terminal())

    class Observer(LearnerObserver):
        def on_phase(self, phase: str) -> None:
            on_phase(phase)

        def on_idle(self, reason: str) -> None:
            heartbeat.say("starting", None, reason)

        def on_weights(self, version: int) -> None:
            heartbeat.say("serving", version)

        def on_commit(self, entry: LedgerEntry) -> None:
            measure(entry)
            screen.show(entry)
            tracking.write(entry)

        def warn(self, text: str) -> None:
            log.warning(text)

    parts.observer = Observer()
    error: str | None = None
    try:
        with screen:
            Learner(parts, watchdog).run()
    except BaseException as problem:
        error = str(problem) or type(problem).__name__
        raise
    finally:
        watchdog.close()
        tracking.close()
        if parts.sender is not None:
            parts.sender.close()
        heartbeat.close(PATIENCE_S, error)


def prepare_process(settings: Settings) -> None:
    """What a process sets before and right after it loads torch, so that its steps give the bytes they always give."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a peer's death is expected, and said in our own words
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.learner.threads))
    if is_local(settings.learner.host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(settings.learner.threads)


class LearnerScreen:
    """Shows versions of `policy` as they are committed. `versions`: how many there will be, 0 where nobody knows. Use
    it as a context."""

    def __init__(self, policy: str, versions: int, console: Console) -> None:
        self._console = console
        self._live = Progress(
            SpinnerColumn(),
            TimeElapsedColumn(),
            *((MofNCompleteColumn(),) if versions else ()),
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
            console=console,
            disable=not console.is_terminal,
        )
        self._policy = policy
        self._task = self._live.add_task(f"{policy}: no version yet", total=versions or None)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, entry: LedgerEntry) -> None:
        """The line of a version that was committed; the time beside it begins anew."""
        text = line(entry)
        self._live.reset(self._task, description=f"{self._policy} {text}", completed=entry["version"])
        if self._live.disable or entry["unchanged"] or any(group["lost"] is not None for group in entry["groups"]):
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


PAUSE_S = 1.0
"""between two looks for a policy that does not exist yet"""


def await_policy(
    settings: Settings, bus: Bus, stopping: Callable[[], bool], *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Return once the policy has a version, or when asked to stop. What is waited for is said once."""
    names, is_said = policy_names.topics(settings), False
    while not stopping() and newest.head(bus, names["weights"], names["ledger"]) is None:
        if not is_said:
            log.warning(
                "waiting for policy %s, which has no version yet: `millrace policy create --model DIR` writes version "
                "0; learning begins then by itself",
                settings.policy.name,
            )
            is_said = True
        sleep(PAUSE_S)


LONGEST_S = 3.0
"""that a start waits for a version of others"""
LOOK_S = 0.25
"""between two looks at the newest version"""


def check_peers(settings: Settings, bus: Bus) -> int:
    """How many live learners the policy has. Raises RefusedMember where this one differs from them, before joining
    costs them a rebalance."""
    tag = identify(settings).tag
    members = bus.group(policy_names.group(settings)).members
    tags = [tag_of(member.client_id) for member in members if not refuses(*address(member.client_id))]
    wrong = tag_differences([*tags, tag], "").get(len(tags))
    if tags and wrong:
        raise RefusedMember(
            f"the learners of {settings.policy.name} that are running differ from this one in {wrong}: "
            "make it equal or stop them, then start it again"
        )
    return len(tags)


def let_commit(
    settings: Settings,
    bus: Bus,
    stopping: Callable[[], bool],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when no version is due: no whole batch is ready, or the others have committed it. Not later than after
    `LONGEST_S`, or when asked to stop."""
    names = policy_names.topics(settings)
    before, deadline = newest.head(bus, names["weights"], names["ledger"]), clock() + LONGEST_S
    now = before
    while now is not None and before is not None and now.version == before.version:
        is_due = _ready_end(bus, names["resolutions"]) - now.seq_hi >= settings.policy.batch
        if not is_due or stopping() or clock() >= deadline:
            return
        sleep(LOOK_S)
        now = newest.head(bus, names["weights"], names["ledger"])


def _ready_end(bus: Bus, resolutions: str) -> int:
    """One past the newest ready group."""
    for record in newest_first(bus, resolutions):
        resolution = readable(Resolution, record)
        if resolution is not None and resolution["kind"] == "ready" and resolution["seq"] is not None:
            return resolution["seq"] + 1
    return 0
