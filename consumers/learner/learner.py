"""The learner's state machine: agree, run a generation (or wait aside as a spare), tear it down, agree again.

Invariants: a learner never leaves a formed group except by closing the group's sockets; no exception object of a broken
generation is kept (its traceback would hold the group's sockets open); whatever breaks a generation is answered the
same way, by regrouping and training the same batch again; an error that would only come again ends the process; a
spare has no share, no weights and no place in a process group, and polls, so that the next change of the group counts
it.
"""

from __future__ import annotations

import time

from millrace.consumers.learner.group import layouts
from millrace.consumers.learner.group.agreement import Roster
from millrace.consumers.learner.group.watch import Watchdog
from millrace.consumers.learner.step import mismatch
from millrace.consumers.learner.step.generation import Generation
from millrace.consumers.learner.step.next_work import Regroup, Stop
from millrace.consumers.learner.step.parts import Parts
from millrace.infra.errors import BusError, LearnerError, RefusedError, RegroupError, UnreachableError
from millrace.infra.log.history import newest
from millrace.trainers.errors import OutOfMemory

MOST_BREAKS = 5
"""generations in a row that broke in training before their first step; more are a fault of ours, not of a peer"""
RETRY_S = 0.5


class Learner:
    """One learner process. `run` returns when it was asked to stop or the last wanted version is committed."""

    def __init__(self, parts: Parts, watchdog: Watchdog) -> None:
        self._parts = parts
        self._watchdog = watchdog
        self._breaks = 0

    def run(self) -> None:
        """Join, and train until it is over. Raises LearnerError when going on makes no sense."""
        p = self._parts
        p.observer.on_phase(f"port {p.url.rpartition(':')[2]}")
        p.membership.join()
        p.observer.on_phase("joined")
        try:
            while not p.stopping():
                roster = self._settle()
                if roster is not None and (self._together(roster) if roster.trains else self._wait_aside(roster)):
                    return
        finally:
            self._watchdog.rest()
            p.backend.tear_down()
            p.membership.leave()

    def _settle(self) -> Roster | None:
        p = self._parts
        try:
            roster = p.membership.settle(p.stopping)
        except UnreachableError as error:
            reason = str(error)
        else:
            p.observer.on_phase("agreed")
            return roster
        p.observer.warn(f"the log does not answer: {reason}")
        time.sleep(RETRY_S)
        return None

    def _wait_aside(self, roster: Roster) -> bool:
        """Wait while others train, or until enough are here; whether learning is over for this process."""
        p = self._parts
        say = layouts.spare_text if roster.world else layouts.shortage_text
        why = say(p.settings.learner, len(roster.members))
        p.observer.on_phase("aside")
        p.observer.on_idle(why)
        p.observer.warn(why)
        try:
            mismatch.refuse(p, roster)
            return wait(p, roster)
        except (RegroupError, UnreachableError) as error:
            reason = _first_line(error)
        p.observer.warn(f"no longer waiting as a spare: {reason}")
        return False

    def _together(self, roster: Roster) -> bool:
        """Run one generation; whether learning is over for this process."""
        p = self._parts
        token = p.membership.token
        assert token is not None, "settled"
        generation = Generation(p, roster, token)
        order: Regroup | Stop | None = None
        broke: str | None = None
        is_ours = False
        self._watchdog.watch(roster)
        try:
            order = generation.run()
        except (RegroupError, RefusedError, UnreachableError, OutOfMemory) as error:
            broke = _first_line(error)
        except (RuntimeError, BusError) as error:
            # A collective that lost a peer raises RuntimeError; alone there is no peer to lose.
            if roster.world == 1:
                raise
            broke, is_ours = _first_line(error), True
        p.observer.on_phase("broke" if broke else "ended")
        self._watchdog.rest()
        p.backend.tear_down()
        generation.close()
        p.observer.on_phase("torn")
        self._breaks = self._breaks + 1 if is_ours and not generation.stepped else 0
        if self._breaks > MOST_BREAKS:
            raise LearnerError(
                f"{self._breaks} generations broke in a row without a version, the last by: {broke}. The other "
                "learners' logs say what ended them; one that dies in every step may lack memory: lower [learner] "
                "tokens_per_pack"
            )
        p.observer.warn(f"generation {roster.generation} of {roster.world} is over: {broke or _reason(order)}")
        return isinstance(order, Stop)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _reason(order: Regroup | Stop | None) -> str:
    return order.reason if order is not None else "it ended"


LOOK_S = 0.2
"""between two polls of the group"""
OVER_S = 2.0
"""between two looks whether the last wanted version is committed"""


def wait(parts: Parts, roster: Roster) -> bool:
    """Poll until the group changes or this process is asked to stop; True when the last wanted version is committed, so
    that nothing is left to wait for. Raises UnreachableError when the log does not answer."""
    look_s = 0.0
    while not parts.stopping() and parts.membership.holds(roster):
        parts.membership.poll(LOOK_S)
        if time.monotonic() - look_s > OVER_S:
            if _over(parts):
                return True
            look_s = time.monotonic()
    return False


def _over(parts: Parts) -> bool:
    last = parts.settings.learner.max_versions
    if not last:
        return False
    head = newest.head(parts.bus, parts.topics["weights"], parts.topics["ledger"])
    return head is not None and head.version >= last
