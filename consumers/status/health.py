"""Whether a deployment is well, and what one that is still starting waits for: from what the topics and the supervisor
say. Pure.

Invariant: to wait is not to be wrong. A policy without version 0 is wrong only where nothing could write one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.consumers.status.watch import StatusWatch
from millrace.infra.machine.programs import BROKER
from millrace.infra.machine.supervisor import ProgramState
from millrace.schemas.ids import Micros

GOOD = ("RUNNING", "STARTING", "EXITED")
"""states of programs in which nothing is wrong"""


def awaited(watch: StatusWatch | str, states: Sequence[ProgramState], now: Micros) -> list[str]:
    """What is still to come at `now` before the policy can learn, in the order in which it comes; `watch` may be why
    there is none. Empty where nothing runs here."""
    if not states:
        return []
    starting = [one.name for one in states if one.state == "STARTING" and not one.failing]
    out = [f"{', '.join(starting)} to start"] if starting else []
    if not isinstance(watch, str):
        out += [
            f"the engine at {one['url']} to load its model (it does not answer yet)"
            for one in watch.workers.values()
            if one["role"] == "engine" and one["state"] == "starting" and one["error"] and one["expires_at"] > now
        ]
    if isinstance(watch, str):
        return [*out, "the topics"] if BROKER in starting else out
    return out if watch.began else [*out, "version 0 (`millrace policy create --model DIR` writes it)"]


def wrong(watch: StatusWatch | str, states: Sequence[ProgramState], silent: Mapping[str, float]) -> bool:
    """Whether nothing runs here, a process does not run, keeps ending or is silent, or the log has no such policy
    although its broker had the time to start."""
    if not states or silent or any(one.failing or one.state not in GOOD for one in states):
        return True
    return isinstance(watch, str) and not any(one.name == BROKER and one.state == "STARTING" for one in states)
