"""Where compiled rules are kept: to compile them costs three seconds of processor time, to load them a tenth of that,
so all deployments of a user share them.

Invariant: what others may write is never loaded."""

from __future__ import annotations

import os
from pathlib import Path

from millrace.infra.machine.jars import cache_dir

VARIABLE = "KF_RULE_CACHE_DIR"
"""where Kingfisher looks"""


def keep_rules(home: Path) -> None:
    """Name the folder to this process and its children, unless their environment does: one of the user, or one of the
    deployment in `home` where that of the user is not to be had."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(_of_user() or home / "cache" / "kingfisher")


def _of_user() -> Path | None:
    try:
        folder = cache_dir() / "kingfisher"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except (OSError, RuntimeError):  # a user without a home
        return None
    is_private = about.st_uid == os.geteuid() and not about.st_mode & 0o022
    return folder if is_private and os.access(folder, os.W_OK) else None
