"""What every command shares: the settings of this call, one line for an error, and a clean end on SIGTERM.

Invariant: a role that SIGTERM breaks off exits with 143, also where something cannot be closed, which is in its log. (A
server takes the signal as a wish, and ends with 0 once it has drained.)"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import core

from millrace.infra.errors import ConfigError, MillraceError
from millrace.infra.process.loaders import find_modules_here
from millrace.infra.terminal import PIPE_COLUMNS, CleanFormatter, Terminal

if TYPE_CHECKING:
    from millrace.infra.config import Settings

logger = logging.getLogger(__name__)
console = Terminal()
complain = Terminal(stderr=True)
core.HAS_RICH = console.is_terminal and complain.is_terminal
HELP_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
if not core.HAS_RICH:  # frames are for terminals: elsewhere each option is one line, whatever its help says
    HELP_SETTINGS["terminal_width"] = PIPE_COLUMNS


def in_help(text: str) -> str:
    """Text as it is, without rich's markup where that is read."""
    return _escape_markup(text) if core.HAS_RICH else text


@dataclass(slots=True)
class CommandFlags:
    """The flags before the command."""

    file: Path | None = None
    flags: dict[str, str] = field(default_factory=dict)

    def settings(self) -> Settings:
        from millrace.infra.config import load

        return load(self.file, self.flags)

    @property
    def path(self) -> Path:
        """Where the settings file lies, if there is one."""
        from millrace.infra.config import FILE, PREFIX

        return self.file or Path(os.environ.get(f"{PREFIX}CONFIG") or FILE)

    def environment(self) -> dict[str, str]:
        """What leads a child process to the same settings: the file and the flags. It inherits the rest."""
        from millrace.infra.config import PREFIX, variables

        file = self.path
        config = {f"{PREFIX}CONFIG": str(file.absolute())} if file.exists() else {}
        return {**config, **variables(self.flags)}


def call(context: typer.Context) -> CommandFlags:
    """The flags of this call."""
    command_flags = context.find_object(CommandFlags)
    return command_flags if command_flags is not None else CommandFlags()


def flags(pairs: list[str]) -> dict[str, str]:
    """`section.key=value` pairs as a table. Raises ConfigError for one without an equals sign."""
    out = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair}: write it as section.key=value")
        out[key.strip()] = value
    return out


class CommandGroup(core.TyperGroup):
    """Errors that are meant for the user are one line and exit code 1; anything else is a bug and shows its trace."""

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if _End.last is not None:
                logger.error("what SIGTERM ended does not close well", exc_info=error)
                raise _End.last from None
            advice = _disk(error) if isinstance(error, OSError) else ""
            if not advice and not isinstance(error, MillraceError):
                raise
            complain.print(
                f"[bold red]error:[/] {_escape_markup(advice or str(error))}", highlight=False, soft_wrap=True
            )
            raise typer.Exit(1) from None


def entry(name: str) -> Callable[..., Any]:
    """`module:function` of another package, imported now: the command line loads only what its command needs."""
    module, _, function = name.partition(":")
    target: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return target


def reading() -> AbstractContextManager[object]:
    """Says on a terminal that the log is being read, which takes minutes where it is long."""
    return complain.status("reading the log") if complain.is_terminal and console.is_terminal else nullcontext()


def become_role(name: str) -> None:
    """Set this process up as a role: plain log lines, agents importable from here, SIGTERM unwinds."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(CleanFormatter(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "openai", "faust", "aiokafka", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    find_modules_here()
    signal.signal(signal.SIGTERM, _end)


class _End(SystemExit):
    """The end that SIGTERM asks for. The last one is kept: what is not Python, such as a library that is being
    imported, makes an error of its own of it that no longer says what it was."""

    last: _End | None = None


def _end(number: int, frame: object) -> None:
    _End.last = _End(128 + number)
    raise _End.last


def _disk(error: OSError) -> str:
    """What to do about a disk that takes nothing, or a name that cannot be had; empty for other errors."""
    place = f" at {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{place}: make room; what was running goes on by itself, else run `millrace up`"
    if isinstance(error, FileExistsError) and error.errno is None:
        return str(error)  # in words of our own
    if error.errno == errno.EROFS:
        return f"the disk is read-only{place}: mount it writable, or choose another home, then run `millrace up`"
    return ""


def _escape_markup(text: str) -> str:
    """Text as it is, without rich's markup."""
    return text.replace("[", r"\[")
