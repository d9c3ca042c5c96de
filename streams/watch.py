"""The runner's hooks as metrics and spans.

A stage folds many trajectories in one turn, so a trajectory's span in a stage says when its turn was committed, not how
long it took; the turn's own times are metrics."""

from __future__ import annotations

from infra import telemetry
from infra.runner.telemetry import TurnReport

RECORDS = telemetry.counter("millrace.stage.records", "{record}", "records folded")
DUPLICATES = telemetry.counter("millrace.stage.duplicates", "{record}", "records skipped as duplicates")
EMITTED = telemetry.counter("millrace.stage.emitted", "{record}", "records written, by topic")
FOLD = telemetry.histogram("millrace.stage.fold", "s", "time to fold a turn")
COMMIT = telemetry.histogram("millrace.stage.commit", "s", "time to commit a turn")
RESTORE = telemetry.histogram("millrace.stage.restore", "s", "time to fence and restore a slot")
LAG = telemetry.gauge("millrace.stage.lag", "{offset}", "offsets behind the stable end")
DROPPED = telemetry.counter("millrace.stage.dropped", "{turn}", "turns that were refused and folded again")


class Watch:
    """`infra.runner.telemetry.Telemetry` on OpenTelemetry."""

    def turn(self, report: TurnReport) -> None:
        RECORDS.add(len(report.records) - report.duplicates, stage=report.stage, slot=report.slot)
        DUPLICATES.add(report.duplicates, stage=report.stage, slot=report.slot)
        for topic, count in report.emitted.items():
            EMITTED.add(count, stage=report.stage, topic=topic)
        FOLD.record(report.fold_s, stage=report.stage)
        COMMIT.record(report.commit_s, stage=report.stage)
        for record in report.records:
            if telemetry.HEADER in record.headers:
                with telemetry.span(f"millrace.{report.stage}", record.headers):
                    pass

    def opened(self, stage: str, slot: int, seconds: float, restored: int) -> None:
        RESTORE.record(seconds, stage=stage)

    def dropped(self, stage: str, slot: int, reason: Exception) -> None:
        DROPPED.add(1, stage=stage, reason=type(reason).__name__)

    def lag(self, stage: str, slot: int, offsets: int) -> None:
        LAG.set(offsets, stage=stage, slot=slot)
