"""Where the CPU time of a deployment goes, by role, dead incarnations included."""

from __future__ import annotations

import psutil

from millrace.infra.machine import leftovers


class CpuUsage:
    """Adds up user and system seconds by role. Call `sample` every second or two: what a process used between the last
    sample and its death is lost."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._roles: dict[tuple[int, float], str] = {}
        self._seconds: dict[tuple[int, float], float] = {}
        self._memory: dict[str, int] = {}

    def sample(self) -> None:
        """Read every live process of the deployment."""
        memory: dict[str, int] = {}
        for process, now in leftovers.members(self._deployment).items():
            try:
                with process.oneshot():
                    key = (process.pid, process.create_time())
                    # Between fork and exec a program still looks like its supervisor.
                    known = self._roles.get(key, leftovers.SUPERVISOR)
                    role = now if known == leftovers.SUPERVISOR else known
                    times = process.cpu_times()
                    memory[role] = memory.get(role, 0) + process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            self._roles[key] = role
            self._seconds[key] = times.user + times.system
        self._memory = memory

    def by_role(self) -> dict[str, float]:
        """CPU seconds so far by role, most first."""
        total: dict[str, float] = {}
        for key, seconds in self._seconds.items():
            total[self._roles[key]] = total.get(self._roles[key], 0.0) + seconds
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def memory(self) -> dict[str, int]:
        """Resident bytes by role at the last sample."""
        return dict(self._memory)
