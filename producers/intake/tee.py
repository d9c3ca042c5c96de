"""`millrace mcp -- command`: a server on standard input and output, with a copy of what passes.

Invariants: bytes pass as they come, unaltered and unbuffered, each direction in a thread of its own, so that a slow
reader holds up nobody else; standard error is the server's own; an end of one side is passed on to the other; signals
go on to the server, but for those that a terminal sent to both; the exit status is the server's, also where a signal
ended it. What capture does never shows in any of this, but for the time that it takes to keep a message."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from millrace.producers.intake.capture import Side

BLOCK = 1 << 20
"""bytes that are passed on at once, and that a pipe to or from the server holds"""
QUIET_MS = 500
"""how long the output of a server that ended may be silent until it counts as ended too: others may hold it open"""
FLUSH_S = 1.0
"""seconds in which what was captured is sent when the server has ended; clients wait two before they kill"""
PASSED_ON = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGWINCH,
}
FROM_KERNEL = 0x80
"""code of a signal that a terminal sent to its whole group"""
NO_COMMAND, NOT_EXECUTABLE = 127, 126


class NotStarted(Exception):
    """The command cannot be run. `status` is what a shell would exit with."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Tee:
    """A server that runs, and the pipes to it. Raises NotStarted. Make it in the main thread, before other threads."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        child_in, to_child = os.pipe()
        from_child, child_out = os.pipe()
        for pipe in (child_in, child_out):
            with suppress(OSError):  # a user may have as much in pipes as is allowed
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, BLOCK)
        actions = [
            (os.POSIX_SPAWN_DUP2, child_in, 0),
            (os.POSIX_SPAWN_DUP2, child_out, 1),
        ]
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
        try:
            self.pid = os.posix_spawnp(
                command[0],
                list(command),
                environment,
                file_actions=actions,
                setsigmask=(),
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
            )
        except OSError as error:
            status = NO_COMMAND if error.errno == errno.ENOENT else NOT_EXECUTABLE
            raise NotStarted(status, f"cannot run {command[0]}: {error.strerror}") from None
        os.close(child_in)
        os.close(child_out)
        self._to_child, self._from_child = to_child, from_child
        self._ended = threading.Event()

    def run(self, client: Side | None, server: Side | None) -> int:
        """Pass everything on until the server has ended; returns its wait status."""
        there = threading.Thread(target=_copy, args=(0, self._to_child, client, None), daemon=True)
        back = threading.Thread(target=_copy, args=(self._from_child, 1, server, self._ended), daemon=True)
        there.start()
        back.start()
        status = self._wait()
        self._ended.set()
        back.join()
        return status

    def _wait(self) -> int:
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            got = signal.sigwaitinfo(PASSED_ON | {signal.SIGCHLD})
            if got.si_signo != signal.SIGCHLD and got.si_code != FROM_KERNEL:
                os.kill(self.pid, got.si_signo)


def _copy(source: int, sink: int, side: Side | None, end: threading.Event | None) -> None:
    """Pass bytes on until either end is gone. Once `end` is set, an end is also a source that stays silent."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    with suppress(OSError):  # the reader is gone: the writer learns of it, since the source is closed
        while True:
            if end is not None:
                while not poll.poll(QUIET_MS):
                    if end.is_set():
                        return
            try:
                data = os.read(source, BLOCK)
            except BlockingIOError:  # somebody made it so, and shares it
                poll.poll()
                continue
            if not data:
                break
            if side is not None:
                side.feed(data)
            _write(sink, memoryview(data))
    if side is not None:
        side.end()
    for descriptor in (source, sink):
        with suppress(OSError):
            os.close(descriptor)


def _write(sink: int, view: memoryview) -> None:
    while view:
        try:
            view = view[os.write(sink, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(sink, select.POLLOUT)
            poll.poll()


def leave(status: int) -> None:
    """End as the server ended, threads or not: with its exit status, or by the signal that ended it."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
