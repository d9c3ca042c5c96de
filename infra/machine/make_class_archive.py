"""Make the archive of Kafka's classes (`class_archive`): a broker starts in a folder of its own and lists the classes
that it loads, and Java writes those to the archive. `make setup` does so once; it takes some ten seconds.

Invariants: the archive gets its name once it is whole, and is mapped once it is sealed; one that is not whole is made
anew; the broker behind it ends with this process, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from millrace.infra import durable
from millrace.infra.errors import ServiceError
from millrace.infra.machine.broker import Broker
from millrace.infra.machine.class_archive import is_intact, place, seal
from millrace.infra.machine.jars import class_path, only_one
from millrace.infra.machine.java import java
from millrace.infra.process.net import wait_until

PDEATHSIG = 1
"""PR_SET_PDEATHSIG of prctl(2)"""
PATIENCE_S = 300


def make() -> Path:
    """The archive for this machine's Java and the jars of the lock, made where there is no whole one. Raises
    ServiceError where Java makes none, OSError where the cache or the folder for temporary files cannot be written."""
    jars = class_path()
    archive = place(java(), jars)
    if not is_intact(archive):
        with only_one(archive.parent):
            if not is_intact(archive):
                archive.unlink(missing_ok=True)  # who maps it keeps it
                _fill(archive, jars)
                seal(archive)
    return archive


def _fill(archive: Path, jars: Sequence[Path]) -> None:
    with tempfile.TemporaryDirectory(prefix="millrace-classes-") as home, durable.drafting(archive) as draft:
        broker = Broker(Path(home))
        broker.prepare()
        class_list = broker.home / "classes"
        _list(broker, class_list)
        flags = ["-Xshare:dump", f"-XX:SharedClassListFile={class_list}", f"-XX:SharedArchiveFile={draft}"]
        command = [str(java()), *flags, "-XX:+UseSerialGC", "-cp", os.pathsep.join(map(str, jars))]
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        if run.returncode or not draft.is_file():
            raise ServiceError(f"{command[0]} ended with code {run.returncode}: {(run.stdout + run.stderr)[-1000:]}")


def _list(broker: Broker, class_list: Path) -> None:
    """Have a prepared broker write to `class_list` which classes it loads until it is ready, and end."""
    program, *arguments = broker.command()
    with broker.log.open("wb") as log:
        process = subprocess.Popen(
            [program, f"-XX:DumpLoadedClassList={class_list}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=broker.home,
            preexec_fn=_end_with_parent,
        )
    try:
        wait_until(lambda: process.poll() is not None or broker.is_ready(), "the broker", PATIENCE_S)
        process.terminate()
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    if not class_list.is_file():
        tail = broker.log.read_text(errors="replace").strip()[-1000:]
        raise ServiceError(f"{program} ended with code {process.returncode} and listed no classes: {tail}")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    try:
        print(make())
    except (ServiceError, OSError, subprocess.TimeoutExpired) as error:
        # Brokers start without it, only slower.
        print(f"no archive of Kafka's classes was made: {error}", file=sys.stderr)
