"""The stages as processes: each runs until SIGTERM."""

from __future__ import annotations

import os
import signal
from threading import Event
from types import FrameType

from infra.bus.connect import connect
from infra.claims import ClaimStore
from infra.config import Settings
from infra.runner.live import run_stage
from infra.runner.slot import Settings as RunnerSettings
from infra.stage import Stage
from streams.dispatch.stage import Dispatch, Terms
from streams.refine.detectors.guard import Guarded
from streams.refine.stage import Refine
from streams.seal.policies import announce
from streams.seal.stage import Seal
from streams.watch import Watch

DETECTORS = ("streams.refine.detectors.vectorscan:Vectorscan", "streams.refine.detectors.kingfisher:Kingfisher")
SECOND = 1_000_000


def refine_of(settings: Settings, detectors: Guarded) -> Refine:
    """The refine stage that the settings describe."""
    return Refine(settings.governance, [detectors], slots=settings.topics.slots, claims=ClaimStore(settings.claims))


def seal_of(settings: Settings) -> Seal:
    """The seal stage: whom it serves and how is in `decisions`."""
    return Seal(claims=ClaimStore(settings.claims))


def dispatch_of(settings: Settings) -> Dispatch:
    """The dispatch stage that the settings describe."""
    policy = settings.policy
    terms = Terms(
        release=policy.release,
        unsolicited_share=policy.unsolicited_share,
        lease=int(policy.lease_s * SECOND),
        reward_deadline_ms=int(policy.reward_deadline_s * 1000),
        awaits=policy.awaits,
        dynamic_sampling=policy.dynamic_sampling,
    )
    return Dispatch(policy.name, settings.topics.slots, terms, ClaimStore(settings.claims))


def run_refine(settings: Settings) -> None:
    """Raw to events, until SIGTERM."""
    os.environ.setdefault("KF_RULE_CACHE_DIR", str(settings.home / "cache" / "kingfisher"))
    detectors = Guarded(DETECTORS)
    try:
        run(settings, refine_of(settings, detectors))
    finally:
        detectors.close()


def run_seal(settings: Settings) -> None:
    """Events to trajectories and completions, until SIGTERM."""
    run(settings, seal_of(settings), announced=True)


def run_dispatch(settings: Settings) -> None:
    """Prompts and completions to grants and resolutions, until SIGTERM."""
    run(settings, dispatch_of(settings), announced=True)


def run(settings: Settings, stage: Stage, *, announced: bool = False) -> None:
    """Run any stage until SIGTERM or SIGINT. `announced`: ask seal to serve the policy first.

    Call it from the main thread."""
    stop = Event()

    def leave(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    runner = RunnerSettings(settings.namespace, claims=ClaimStore(settings.claims), telemetry=Watch())
    with connect(settings) as bus:
        if announced:
            announce(settings, bus)
        run_stage(bus, stage, runner, stop, client_id=f"{stage.name}-{os.getpid()}")
