"""Runs a command under limits: `python limited.py LIMITS STATUS COMMAND...`. A script of the standard library alone,
started by `running`, since nothing of Python's may run between fork and exec of a process that has threads.

LIMITS is JSON of `cpu_s`, `memory_bytes`, `file_bytes` and `files`; STATUS the descriptor of a pipe.
Invariant: the pipe gets a byte if and only if the command could not be started under these limits."""

import ctypes
import json
import os
import resource
import signal
import sys

DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)"""


def main(limits: dict[str, int], status: int, command: list[str]) -> None:
    """Become the command. Returns only where that failed."""
    try:
        os.set_inheritable(status, False)
        ctypes.CDLL(None, use_errno=True).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        for kind, most in (
            (resource.RLIMIT_CPU, limits["cpu_s"]),
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits["file_bytes"]),
            (resource.RLIMIT_NOFILE, limits["files"]),
            (resource.RLIMIT_CORE, 0),
        ):
            _, hard = resource.getrlimit(kind)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        os.execvp(command[0], command)
    except (OSError, ValueError):
        os.write(status, b"x")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    sys.exit(127)
