"""Runs a command under limits: `python limit_command.py OPTIONS COMMAND...`. A script of the standard library,
started
by `running`, since nothing of Python's may run between fork and exec of a process that has threads.

OPTIONS is JSON, see `RunLimits`. With `isolated` the command runs in namespaces of its own: it sees no process but its
own, no network but a loopback of its own, and may write nowhere but in memory, where its directory is copied to; its
first process is this script, which has rights that the command lacks, watches it, and ends all that it started.

What is said goes into the pipe `status`, each line after the word `token`, which the command does not know: `refused
WHY` if and only if it could not be started so; isolated also `began`, then `ended STATUS` (negative: a signal) or
`timeout`."""

import ctypes
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import stat
import struct
import sys
import time
from typing import NoReturn, TypedDict

DEATH_SIGNAL, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38
"""of prctl(2)"""
NEW_MOUNT, NEW_IPC, NEW_USER, NEW_PID, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
"""of unshare(2)"""
NO_SETUID, NO_DEVICES, NO_PROGRAMS, RECURSIVE, PRIVATE_MOUNT = 2, 4, 8, 0x4000, 0x40000
"""of mount(2)"""
SET_ATTRIBUTES, HERE, ALL_BELOW, READ_ONLY = 442, -100, 0x8000, 1
"""of mount_setattr(2), which has this number everywhere; kernels since 5.12 have it"""
SET_FLAGS, UP = 0x8914, 1
"""of netdevice(7)"""
NOBODY_ELSE = 1000
"""the user that root is in the namespaces"""
TICK_S = 0.05
SHARED_BYTES = 64 << 20
"""in /dev/shm"""
INODES = 65_536
LIBC = ctypes.CDLL(None, use_errno=True)


class RunLimits(TypedDict):
    """What a run may do."""

    cpu_s: int
    memory_bytes: int
    """of each process; isolated, of all of them together"""
    file_bytes: int
    files: int
    parent: int
    """process id of whoever starts this: its end is the end of the run"""
    token: str
    status: int
    """descriptor of a pipe"""
    isolated: bool
    timeout_s: float
    """from here on of isolated ones"""
    space_bytes: int
    """of the directory in memory"""
    processes: int
    report: str
    """name of the file that is copied out of the directory when all have ended, empty for none"""
    report_fd: int
    report_bytes: int


def main(options: RunLimits, command: list[str]) -> int:
    """Become the command, or wait for it. Returns only where it could not be started."""
    for descriptor in (options["status"], options["report_fd"]) if options["isolated"] else (options["status"],):
        os.set_inheritable(descriptor, False)
    try:
        if options["isolated"]:
            enter()
            mortal(options)
            if inner := os.fork():
                os.waitpid(inner, 0)
                os._exit(0)
            first(options, command)
        mortal(options)
        become(options, command)
    except (OSError, ValueError) as error:
        say(options, f"refused {error}")
    return 127


def say(options: RunLimits, words: str) -> None:
    """Tell whoever started this."""
    os.write(options["status"], f"{options['token']} {words}\n".encode(errors="replace"))


def mortal(options: RunLimits) -> None:
    """Die with whoever started this."""
    call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != options["parent"]:
        os._exit(1)


def become(options: RunLimits, command: list[str]) -> NoReturn:
    """Take on the limits and the command."""
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    limits = [
        (resource.RLIMIT_CPU, options["cpu_s"]),
        (resource.RLIMIT_AS, options["memory_bytes"]),
        (resource.RLIMIT_FSIZE, options["file_bytes"]),
        (resource.RLIMIT_NOFILE, options["files"]),
        (resource.RLIMIT_CORE, 0),
    ]
    if options["isolated"]:  # elsewhere all processes of this user count
        limits.append((resource.RLIMIT_NPROC, options["processes"]))
    for kind, most in limits:
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    os.execvp(command[0], command)


def enter() -> None:
    """Enter new namespaces as a user who is not root in them: whatever this user executes has no rights there."""
    user, group = os.getuid(), os.getgid()
    call("unshare", NEW_USER | NEW_MOUNT | NEW_PID | NEW_NETWORK | NEW_IPC)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user or NOBODY_ELSE} {user} 1"),
        ("gid_map", f"{group or NOBODY_ELSE} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def first(options: RunLimits, command: list[str]) -> NoReturn:
    """Be the first process of the namespaces: with its end the kernel ends all others."""
    words = ""
    try:
        call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel keeps from a first process what it does not handle
        furnish(os.getcwd(), options["space_bytes"])
        call("prctl", DUMPABLE, 0, 0, 0, 0)
        child = begin(options, command) if command else 0
        say(options, "began")
        words = f"ended {-signal.SIGKILL}"  # what is said if its program makes this one fail
        words = watch(options, child) if child else "ended 0"
        if options["report"]:
            copy_report(options)
    except (OSError, ValueError) as error:  # shutil's are OSErrors
        words = words or f"refused {error}"
    finally:
        say(options, words or "refused")
        os._exit(0)


def furnish(work: str, space_bytes: int) -> None:
    """Processes, loopback and files of these namespaces: all is read-only, and `work` a copy in memory."""
    source = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    call("mount", None, b"/", None, RECURSIVE | PRIVATE_MOUNT, None)
    call("mount", b"proc", b"/proc", b"proc", NO_SETUID | NO_DEVICES | NO_PROGRAMS, None)
    attributes = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    call("syscall", SET_ATTRIBUTES, HERE, b"/", ALL_BELOW, attributes, len(attributes))
    in_memory(work, space_bytes)
    if os.path.isdir("/dev/shm"):
        in_memory("/dev/shm", SHARED_BYTES)
    shutil.copytree(f"/proc/self/fd/{source}", work, dirs_exist_ok=True)
    os.close(source)
    os.chdir(work)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", b"lo", UP))


def in_memory(place: str, space_bytes: int) -> None:
    mount_options = f"size={space_bytes},nr_inodes={INODES},mode=0700"
    call("mount", b"tmpfs", place.encode(), b"tmpfs", NO_SETUID | NO_DEVICES, mount_options.encode())


def begin(options: RunLimits, command: list[str]) -> int:
    """Start the command; its process id."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        become(options, command)
    except (OSError, ValueError) as error:
        say(options, f"refused {error}")
    finally:
        os._exit(127)


def watch(options: RunLimits, child: int) -> str:
    """Wait for the command's end or end it, then all others. What is to be said of it."""
    end = time.monotonic() + options["timeout_s"]
    words, last_look = "", 0.0
    while not words:
        signal.sigtimedwait({signal.SIGCHLD}, TICK_S)
        words = reap(child)
        now = time.monotonic()
        if not words and now >= end:
            words = "timeout"
        elif not words and now >= last_look + TICK_S:
            last_look = now
            size, processes = used()
            if size > options["memory_bytes"] or processes > options["processes"]:
                words = f"ended {-signal.SIGKILL}"
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        return words


def reap(child: int) -> str:
    """Take what has ended; what is to be said if the command is among it."""
    try:
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            if end[0] == child:
                return f"ended {os.waitstatus_to_exitcode(end[1])}"
    except ChildProcessError:
        pass  # the command was among what was taken before
    return ""


def used() -> tuple[int, int]:
    """(bytes of memory that is no file's, processes) of all but this one."""
    pages = processes = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/statm") as file:
                _, resident, shared_pages, *_ = file.read().split()
        except (OSError, ValueError):
            continue  # it ended
        pages += int(resident) - int(shared_pages)
        processes += 1
    return pages * resource.getpagesize(), processes


def copy_report(options: RunLimits) -> None:
    """Anything may lie in its place: only a file of its length is copied, and nothing is waited for."""
    try:
        handle = os.open(options["report"], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        info = os.fstat(handle)
        if stat.S_ISREG(info.st_mode) and info.st_size <= options["report_bytes"]:
            with os.fdopen(options["report_fd"], "wb") as out:
                out.write(os.pread(handle, options["report_bytes"], 0))
    finally:
        os.close(handle)


def call(name: str, *values: object) -> None:
    """A function of the C library. Raises OSError where it returns less than 0."""
    arguments = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
    if getattr(LIBC, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
