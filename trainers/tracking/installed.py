"""Packages that a tracker needs and that may be missing."""

from __future__ import annotations

import importlib
from typing import Any

from trainers.errors import BadConfiguration


def package(name: str, tracker: str) -> Any:
    """The module `name`, imported now. Raises BadConfiguration where it is not installed, with what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadConfiguration(
            f"the tracker {tracker} needs {name}, which is not installed ({error}): pip install 'millrace[tracking]', "
            f"or leave {tracker} out"
        ) from error
