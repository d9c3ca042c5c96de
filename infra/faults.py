"""Named points of the write paths at which a process may be killed, so that every crash can be rehearsed.

    faults.point("runner.after_send")

Armed by the environment:

- `MILLRACE_KILL=name[:nth]` sends SIGKILL to this process the nth time it passes the point (first by default);
- `MILLRACE_KILL_ONCE=FILE` does so only if FILE can be created, so that the restarted process lives;
- `MILLRACE_KILL_DIR=DIR` kills the first process of the deployment that passes a point whose name is a file in DIR, and
  takes the file away: this arms points of processes that already run.

Invariants: a point that is not armed costs one comparison; every point is a literal in the code, so that tests
find them all; no lock is held at a point. In the in-memory world `install` puts a scheduler in the place of the signal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

Hook = Callable[[str], None]


def _killer(spec: str, once: str) -> Hook | None:
    if not spec:
        return None
    target, _, nth = spec.partition(":")
    countdown = int(nth or 1)

    def hook(name: str) -> None:
        nonlocal countdown
        if name != target:
            return
        countdown -= 1
        if countdown == 0:
            if once:
                with suppress(FileExistsError):
                    os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                    os.kill(os.getpid(), signal.SIGKILL)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _killer_by_file(directory: str) -> Hook | None:
    if not directory:
        return None

    def hook(name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


_hook: Hook | None = _killer(
    os.environ.get("MILLRACE_KILL", ""), os.environ.get("MILLRACE_KILL_ONCE", "")
) or _killer_by_file(os.environ.get("MILLRACE_KILL_DIR", ""))


def point(name: str) -> None:
    """Pass a named point. Returns, unless the point is armed."""
    if _hook is not None:
        _hook(name)


def install(hook: Hook | None) -> Hook | None:
    """Put `hook` behind every point of this process (None disarms). Returns the hook that was there."""
    global _hook
    before, _hook = _hook, hook
    return before
