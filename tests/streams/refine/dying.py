"""A detector that fails in every way native code does. In a module of its own: child processes import it by name."""

from __future__ import annotations

import os

from millrace.streams.refine.detectors.base import Detector, Hit


class Dying(Detector):
    """Flags everything, unless told to fail."""

    name = "dying"

    def version(self) -> str:
        return "dying-1"

    def scan(self, text: bytes) -> list[Hit]:
        if text == b"die":
            os._exit(11)
        while text == b"hang":
            pass
        if text == b"raise":
            raise ValueError("quotes what it read")
        return [Hit(0, len(text), "all", "dying", True)] if text else []
