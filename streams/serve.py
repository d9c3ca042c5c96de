"""The stages as processes, each until SIGTERM, with their hooks as metrics and spans.

A stage folds many trajectories in one turn, so a trajectory's span in a stage lasts from when the record that ends it
(or its group) was written to when the turn with it was committed; the turn's own times are metrics. What comes before
that record makes no span: one a process is enough to follow a trajectory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from types import FrameType

from millrace.infra import telemetry
from millrace.infra.config import Settings
from millrace.infra.connect import connect
from millrace.infra.log.base import Bus, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.sweep import Sweeping
from millrace.infra.log.topics import PARTS
from millrace.infra.stages.base import Stage
from millrace.infra.stages.live import run_stage
from millrace.infra.stages.slot import RunnerSettings
from millrace.infra.stages.telemetry import TurnReport
from millrace.streams.dispatch import announce as asking
from millrace.streams.dispatch.stage import Dispatch, Terms
from millrace.streams.refine.detectors.guard import GuardedDetectors
from millrace.streams.refine.detectors.rule_cache import keep_rules
from millrace.streams.refine.names import key_in
from millrace.streams.refine.stage import Refine
from millrace.streams.refine.subjects.store import registries_of
from millrace.streams.seal.policy_terms import announce
from millrace.streams.seal.stage import Seal

RECORDS = telemetry.counter("millrace.stage.records", "{record}", "records folded")
DUPLICATES = telemetry.counter("millrace.stage.duplicates", "{record}", "records skipped as duplicates")
EMISSIONS = telemetry.counter("millrace.stage.emitted", "{record}", "records written, by topic")
FOLD = telemetry.histogram("millrace.stage.fold", "s", "time to fold a turn")
COMMIT = telemetry.histogram("millrace.stage.commit", "s", "time to commit a turn")
RESTORE = telemetry.histogram("millrace.stage.restore", "s", "time to fence and restore a slot")
LAG = telemetry.gauge("millrace.stage.lag", "{offset}", "offsets behind the stable end")
DISPOSITIONS = telemetry.counter(
    "millrace.dispositions", "{disposition}", "ends of events, groups and tickets, by topic and kind or reason"
)
DROPPED_TURNS = telemetry.counter("millrace.stage.dropped", "{turn}", "turns that were refused and folded again")


class StageMetrics:
    """`millrace.infra.stages.telemetry.RunnerHooks` on OpenTelemetry."""

    def turn(self, report: TurnReport) -> None:
        RECORDS.add(len(report.records) - report.duplicates, stage=report.stage, slot=report.slot)
        DUPLICATES.add(report.duplicates, stage=report.stage, slot=report.slot)
        for topic, count in report.emitted.items():
            EMISSIONS.add(count, stage=report.stage, topic=topic)
        FOLD.record(report.fold_s, stage=report.stage)
        COMMIT.record(report.commit_s, stage=report.stage)
        for (topic, end), count in report.ends.items():
            if topic == "dead-letters" or topic.endswith(".resolutions"):
                DISPOSITIONS.add(count, stage=report.stage, topic=topic, end=end)
        for record in report.records:
            for context in contexts(record):
                # A policy's own stage is called <policy>.<stage>, and its span as its role.
                name, headers = f"millrace.{report.stage.rpartition('.')[2]}", {telemetry.HEADER: context}
                with telemetry.span(name, headers, since=record.timestamp, stage=report.stage):
                    pass

    def on_open(self, stage: str, slot: int, seconds: float, record_count: int) -> None:
        RESTORE.record(seconds, stage=stage)

    def on_drop(self, stage: str, slot: int, reason: Exception) -> None:
        DROPPED_TURNS.add(1, stage=stage, reason=type(reason).__name__)

    def lag(self, stage: str, slot: int, offsets: int) -> None:
        LAG.set(offsets, stage=stage, slot=slot)


def contexts(record: Record) -> list[str]:
    """Contexts of the trajectories that end with a record, or whose group does."""
    headers = record.headers
    if telemetry.MANY in headers:
        return headers[telemetry.MANY].decode("ascii", "replace").split(",")
    is_end = headers.get("kind") == b"episode_ended" and telemetry.HEADER in headers
    return [headers[telemetry.HEADER].decode("ascii", "replace")] if is_end else []


DETECTORS = (
    "millrace.streams.refine.detectors.vectorscan:Vectorscan",
    "millrace.streams.refine.detectors.kingfisher:Kingfisher",
)
SECOND = 1_000_000


def refine_of(settings: Settings, detectors: GuardedDetectors, claims: ClaimStore | None = None) -> Refine:
    """The refine stage that the settings describe."""
    key = settings.governance.name_key.get_secret_value().encode() or key_in(settings.home)
    return Refine(
        settings.governance,
        [detectors],
        slots=settings.topics.slots,
        claims=claims or ClaimStore(settings.claims),
        owners={settings.policy.name: settings.policy.tenant} if settings.policy.tenant else {},
        name_key=key,
        reward_key=settings.reward.key.get_secret_value(),
        registries=registries_of(settings.governance, settings.home),
    )


def seal_of(settings: Settings, claims: ClaimStore | None = None) -> Seal:
    """The seal stage: whom it serves and how is in `decisions`."""
    return Seal(claims=claims or ClaimStore(settings.claims))


def dispatch_terms(settings: Settings) -> Terms:
    """How the configured policy begins."""
    policy = settings.policy
    return Terms(
        release=policy.release,
        unsolicited_share=asking.share_of(settings),
        lease=int(policy.lease_s * SECOND),
        reward_deadline_ms=int(policy.reward_deadline_s * 1000),
        awaits=policy.awaits,
        dynamic_sampling=policy.dynamic_sampling,
    )


def dispatch_of(settings: Settings) -> Dispatch:
    """The dispatch stage that the settings describe."""
    terms, claims = dispatch_terms(settings), ClaimStore(settings.claims)
    return Dispatch(settings.policy.name, settings.topics.slots, terms, claims)


def run_refine(settings: Settings) -> None:
    """Raw to events, until SIGTERM; and bodies of large records go when nothing refers to them any more."""
    keep_rules(settings.home)
    detectors = GuardedDetectors(DETECTORS)
    kept_s = settings.topics.short_hours * 3600
    sweeping = Sweeping(
        partial(connect, settings),
        settings.namespace,
        ClaimStore(settings.claims),
        patience_s=kept_s,
        interval_s=kept_s / PARTS,
    )
    try:
        with sweeping:
            run(settings, refine_of(settings, detectors))
    finally:
        detectors.close()


def run_seal(settings: Settings) -> None:
    """Events to trajectories and completions, until SIGTERM."""
    run(settings, seal_of(settings), first=(announce,))


def run_dispatch(settings: Settings) -> None:
    """Prompts and completions to grants and resolutions, until SIGTERM."""
    run(settings, dispatch_of(settings), first=(announce, asking.announce))


def run(settings: Settings, stage: Stage, *, first: Sequence[Callable[[Settings, Bus], object]] = ()) -> None:
    """Run any stage until SIGTERM or SIGINT. `first`: what its settings ask for is written to `decisions` before.

    Call it from the main thread."""
    stop = Event()

    def leave(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    runner = RunnerSettings(settings.namespace, claims=ClaimStore(settings.claims), telemetry=StageMetrics())
    with connect(settings) as bus:
        for ask in first:
            ask(settings, bus)
        run_stage(bus, stage, runner, stop, client_id=f"{stage.name}-{os.getpid()}")
