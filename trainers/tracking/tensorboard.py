"""Points as TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from millrace.trainers.tracking.base import Tracker
from millrace.trainers.tracking.packages import package


class TensorboardTracker(Tracker):
    """Event files in `directory`, one more for each process that writes. A point is one event with all its scalars, so
    it is there whole or not at all."""

    def __init__(self, directory: Path) -> None:
        writer = package("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = package("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = package("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._last = max((step for step, _ in points(directory)), default=-1)
        self._writer = writer.EventFileWriter(str(directory))

    @property
    def last(self) -> int:
        return self._last

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(step=step, summary=self._summary(value=values)))
        self._writer.flush()
        self._last = step

    def close(self) -> None:
        self._writer.close()


def points(directory: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Every point that event files in `directory` hold, file by file; of a file that was cut short, the whole ones."""
    loader = package("tensorboard.backend.event_processing.event_file_loader", "tensorboard")
    event = package("tensorboard.compat.proto.event_pb2", "tensorboard").Event
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for content in loader.RawEventFileLoader(str(path)).Load():
            parsed = event.FromString(content)
            if parsed.summary.value:
                yield parsed.step, {value.tag: value.simple_value for value in parsed.summary.value}
