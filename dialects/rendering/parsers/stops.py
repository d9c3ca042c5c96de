"""Cutting text before the first of some stop strings while it arrives."""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """Invariant: what `feed` lets through never has to be taken back; after a stop string nothing comes through."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def feed(self, text: str) -> str:
        """What of the text so far is certain not to begin a stop string."""
        if self.stopped or not self.stops:
            return "" if self.stopped else text
        text = self._held + text
        starts = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if starts:
            self.stopped, self._held = True, ""
            return text[: min(starts)]
        keep = max(_overlap(text, stop) for stop in self.stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and turned out to begin no stop string."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
