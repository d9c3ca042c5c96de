"""How many processes a gateway has, and had: what a change of `[gateway] processes` leaves behind.

Each process has a folder, a capture log and a source of its own, the first one those of a gateway of one process. What
the numbers were is kept beside the first log, for as long as a session may be known from it.

Invariants: a process's folder follows from its index alone, so that its sessions come back to it whatever the number
is; a number that changed is known until everything that began under it is too old to be asked for."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from millrace.infra import durable
from millrace.infra.config import Settings
from millrace.infra.errors import ConfigError

INDEX = "MILLRACE_PROCESS"
"""the environment variable that says which process of the gateway one is"""
FILE = "processes"
DRAIN_MARK = "drained"


class ProcessCount(msgspec.Struct, array_like=True):
    """A number of processes, and since when (micros)."""

    processes: int
    since: int


def folder_of(capture_dir: Path, index: int) -> Path:
    """Where the process of an index keeps its capture log."""
    return capture_dir if index == 0 else capture_dir.with_name(f"{capture_dir.name}-{index}")


def with_folder(settings: Settings, folder: Path) -> Settings:
    """The settings of a process whose capture log is in this folder."""
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"capture_dir": folder})})


def own_index() -> int:
    """The index of this process. Raises ConfigError for a variable that is no number."""
    text = os.environ.get(INDEX) or "0"
    if not text.isdecimal():
        raise ConfigError(f"{INDEX}={text}: the index of one of [gateway] processes, the first is 0")
    return int(text)


def counts(settings: Settings, now: int) -> list[ProcessCount]:
    """The numbers of processes that there were, as far as they matter at `now` (micros), the newest last, which is the
    present one."""
    present, history = settings.gateway.processes, _stored_counts(settings.gateway.capture_dir)
    if not history or history[-1].processes != present:
        history.append(ProcessCount(present, now))
    kept_us = settings.topics.short_hours * 3600 * 1_000_000
    # A number is over when the next one began.
    over = sum(after.since < now - kept_us for after in history[1:])
    return history[over:]


def note(settings: Settings, now: int) -> tuple[int, ...]:
    """A process starts: keep what the numbers were; returns the former ones that matter, the newest first."""
    folder, present, history = settings.gateway.capture_dir, settings.gateway.processes, counts(settings, now)
    if history != (_stored_counts(folder) or [ProcessCount(1, history[0].since)]):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        durable.write(folder / FILE, msgspec.json.encode(history))
    return tuple(dict.fromkeys(count.processes for count in reversed(history) if count.processes != present))


def _stored_counts(folder: Path) -> list[ProcessCount]:
    """What the file says. Where there is none one process came before, if any did."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=list[ProcessCount])
    except (OSError, msgspec.DecodeError):
        return [ProcessCount(1, 0)] if (folder / "lock").exists() else []


def retired_indexes(settings: Settings, now: int) -> list[int]:
    """The indexes beyond the present number whose folders may hold sessions, or what is still to be sent."""
    most = max(count.processes for count in counts(settings, now))
    beyond = range(settings.gateway.processes, most)
    return [index for index in beyond if not is_drained(settings.gateway.capture_dir, index)]


def is_drained(capture_dir: Path, index: int) -> bool:
    """Whether a retired process has ended all that it held, or never held anything. One that is only down has not."""
    folder = folder_of(capture_dir, index)
    return not folder.is_dir() or (folder / DRAIN_MARK).exists()


def mark_drain(capture_dir: Path, index: int, is_drained: bool) -> None:
    """Say that it has, and begins nothing any more; or that it serves."""
    mark = folder_of(capture_dir, index) / DRAIN_MARK
    if is_drained:
        durable.write(mark, b"")
    else:
        mark.unlink(missing_ok=True)
