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

Tasks = tuple[int, ...]


def optimum(
    times: Sequence[int], slots: int, batch: int, training: int, eta: int, *, in_line_order: bool = False
) -> float:
    """Seconds until the last version is committed. `in_line_order`: tasks begin in the order given, as dispatch grants
    them; else in any."""

    def starts(waiting: Tasks, free: int) -> Iterator[tuple[Tasks, Tasks]]:
        """(which tasks begin, which wait on)"""
        for many in range(min(free, len(waiting)) + 1):
            for begun in [waiting[:many]] if in_line_order else sorted(set(combinations(waiting, many))):
                still = list(waiting)
                for time in begun:
                    still.remove(time)
                yield begun, tuple(still)

    @cache
    def rest(version: int, left: int, waiting: Tasks, running: tuple[Tasks, ...], done: Tasks) -> float:
        """From here to the end. left: seconds that the training of batch `version` still takes, -1 while idle; running:
        (seconds left, version when it began) of each task; done: versions when they began."""
        if version * batch == len(times):
            return 0
        choices = [(left, done)]
        if left < 0 and len(done) >= batch:
            late = [*done[batch:], *(since for _, since in running)]
            if done[0] >= version - eta and all(since >= version + 1 - eta for since in late):
                choices.append((training, done[batch:]))
        best = math.inf
        for seconds, others in choices:
            for begun, still in starts(waiting, slots - len(running)):
                busy = sorted((*running, *((time, version) for time in begun)))
                nexts = [time for time, _ in busy] + [seconds] * (seconds >= 0)
                if nexts:
                    passed = min(nexts)
                    over = tuple(sorted((*others, *(since for time, since in busy if time == passed))))
                    on = tuple((time - passed, since) for time, since in busy if time > passed)
                    is_idle = seconds < 0 or seconds == passed
                    later = rest(version + (seconds == passed), -1 if is_idle else seconds - passed, still, on, over)
                    best = min(best, passed + later)
        return best

    return rest(0, -1, tuple(times) if in_line_order else tuple(sorted(times)), (), ())
