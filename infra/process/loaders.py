"""Loads what users name in settings: agents, verifiers and other functions, as `module:function`.

Invariant: the directory that a process runs in is where users' modules are found, but last, so that no file there can
stand in for a module of Millrace or of a library.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from millrace.infra.errors import ConfigError, MillraceError


def find_modules_here() -> None:
    """Let modules of the working directory be imported, after everything that is installed."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def load_function(name: str, owner: str, example: str, error: type[MillraceError] = ConfigError) -> Any:
    """The function that `module:function` names. `owner` says in errors whose name this is. Raises `error`."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise error(f"{owner} {name!r} must be module:function, such as {example}")
    find_modules_here()
    try:
        target = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as cause:
        raise error(f"{owner} {name!r} cannot be loaded: {cause}") from cause
    if not callable(target):
        raise error(f"{owner} {name!r} is not a function")
    return target
