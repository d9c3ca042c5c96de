"""The best that any scheduler could do, by exhaustive search of small instances.

An instance is n = versions x B tasks whose times are known, so many slots, a training time and eta. The scheduler sees
everything beforehand. Whenever a task ends or a version is committed it starts any tasks (also none) on free slots, and
trains or waits. Each task is trained once. The law: a task that began while version s was the newest is in batch s +
eta or an earlier one.

Of the tasks that are done, a batch takes those that began longest ago: two that are done differ in nothing but their
deadline, so an exchange makes no schedule worse. Nothing else is pruned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

Running = tuple[tuple[int, int], ...]
"""(seconds left, version when it began) of each task that runs"""


def optimum(
    times: Sequence[int], slots: int, batch: int, training: int, eta: int, *, in_line_order: bool = False
) -> float:
    """Seconds until the last version is committed. `in_line_order`: tasks begin in the order given, as dispatch grants
    them; else in any."""
    versions = len(times) // batch

    def starts(waiting: tuple[int, ...], free: int) -> Iterator[tuple[int, ...]]:
        for many in range(min(free, len(waiting)) + 1):
            yield from [waiting[:many]] if in_line_order else sorted(set(combinations(waiting, many)))

    @cache
    def rest(version: int, left: int, waiting: tuple[int, ...], running: Running, done: tuple[int, ...]) -> float:
        """From here to the end. left: seconds that the training of batch `version` still takes, -1 while idle."""
        if version == versions:
            return 0
        best = math.inf
        choices = [(left, done)]
        if left < 0 and len(done) >= batch:
            late = [*done[batch:], *(since for _, since in running)]
            if done[0] >= version - eta and all(since >= version + 1 - eta for since in late):
                choices.append((training, done[batch:]))
        for seconds, others in choices:
            for begun in starts(waiting, slots - len(running)):
                still = list(waiting)
                for time in begun:
                    still.remove(time)
                busy = tuple(sorted((*running, *((time, version) for time in begun))))
                best = min(best, step(version, seconds, tuple(still), busy, others))
        return best

    def step(version: int, left: int, waiting: tuple[int, ...], running: Running, done: tuple[int, ...]) -> float:
        """Let time pass to the next event."""
        nexts = [time for time, _ in running] + ([left] if left >= 0 else [])
        if not nexts:
            return math.inf
        passed = min(nexts)
        ends = [since for time, since in running if time == passed]
        busy = tuple((time - passed, since) for time, since in running if time > passed)
        is_committed = left == passed
        return passed + rest(
            version + is_committed,
            -1 if left < 0 or is_committed else left - passed,
            waiting,
            busy,
            tuple(sorted((*done, *ends))),
        )

    return rest(0, -1, tuple(times) if in_line_order else tuple(sorted(times)), (), ())
