"""The runner's hooks as metrics and spans.

A stage folds many trajectories in one turn, so a trajectory's span in a stage lasts from when the record that ends it
(or its group) was written to when the turn with it was committed; the turn's own times are metrics. What comes before
that record makes no span: one a process is enough to follow a trajectory."""

from __future__ import annotations

from millrace.infra import telemetry
from millrace.infra.log.base import Record
from millrace.infra.stages.telemetry import TurnReport

RECORDS = telemetry.counter("millrace.stage.records", "{record}", "records folded")
DUPLICATES = telemetry.counter("millrace.stage.duplicates", "{record}", "records skipped as duplicates")
EMITTED = telemetry.counter("millrace.stage.emitted", "{record}", "records written, by topic")
FOLD = telemetry.histogram("millrace.stage.fold", "s", "time to fold a turn")
COMMIT = telemetry.histogram("millrace.stage.commit", "s", "time to commit a turn")
RESTORE = telemetry.histogram("millrace.stage.restore", "s", "time to fence and restore a slot")
LAG = telemetry.gauge("millrace.stage.lag", "{offset}", "offsets behind the stable end")
DISPOSITIONS = telemetry.counter(
    "millrace.dispositions", "{disposition}", "ends of events, groups and tickets, by topic and kind or reason"
)
DROPPED = telemetry.counter("millrace.stage.dropped", "{turn}", "turns that were refused and folded again")


class StageMetrics:
    """`millrace.infra.stages.telemetry.RunnerHooks` on OpenTelemetry."""

    def turn(self, report: TurnReport) -> None:
        RECORDS.add(len(report.records) - report.duplicates, stage=report.stage, slot=report.slot)
        DUPLICATES.add(report.duplicates, stage=report.stage, slot=report.slot)
        for topic, count in report.emitted.items():
            EMITTED.add(count, stage=report.stage, topic=topic)
        FOLD.record(report.fold_s, stage=report.stage)
        COMMIT.record(report.commit_s, stage=report.stage)
        for (topic, end), count in report.ends.items():
            if topic == "dead-letters" or topic.endswith(".resolutions"):
                DISPOSITIONS.add(count, stage=report.stage, topic=topic, end=end)
        for record in report.records:
            for context in contexts(record):
                # A policy's own stage is called <policy>.<stage>, and its span as its role.
                name, carried = f"millrace.{report.stage.rpartition('.')[2]}", {telemetry.HEADER: context}
                with telemetry.span(name, carried, since=record.timestamp, stage=report.stage):
                    pass

    def opened(self, stage: str, slot: int, seconds: float, restored: int) -> None:
        RESTORE.record(seconds, stage=stage)

    def dropped(self, stage: str, slot: int, reason: Exception) -> None:
        DROPPED.add(1, stage=stage, reason=type(reason).__name__)

    def lag(self, stage: str, slot: int, offsets: int) -> None:
        LAG.set(offsets, stage=stage, slot=slot)


def contexts(record: Record) -> list[str]:
    """Contexts of the trajectories that end with a record, or whose group does."""
    headers = record.headers
    if telemetry.MANY in headers:
        return headers[telemetry.MANY].decode("ascii", "replace").split(",")
    ended = headers.get("kind") == b"episode_ended" and telemetry.HEADER in headers
    return [headers[telemetry.HEADER].decode("ascii", "replace")] if ended else []
