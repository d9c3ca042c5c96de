"""The process `millrace reward`: ended episodes in, reward events out, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from infra import telemetry
from infra.bus.base import Bus
from infra.bus.connect import connect
from infra.claims import ClaimStore
from infra.config import Settings
from infra.errors import ClaimError
from infra.topics import full_name
from schemas import codec
from schemas.ids import now_micros
from streams.reward.agents import run_agent
from streams.reward.judge import Judge, awaited, reward_event
from streams.reward.pool import VerifierPool

log = logging.getLogger(__name__)

VERDICTS = telemetry.counter("millrace.reward.verdicts", "{verdict}", "verdicts, by outcome")
IN_FLIGHT = 32
"""episodes judged at once; more than workers, so that publishing overlaps with judging"""


class Judging:
    """Handles one record of `events`: judge it if it asks for us, and return once the answer is in the log."""

    def __init__(self, bus: Bus, pool: VerifierPool, judge: Judge, raw: str, claims: ClaimStore) -> None:
        self._publisher = bus.publisher()
        self._pool = pool
        self._judge = judge
        self._raw = raw
        self._claims = claims

    async def __call__(self, value: bytes, headers: Mapping[str, bytes]) -> None:
        if headers.get("kind") != b"episode_ended":
            return
        try:
            event = self._event(value)
        except ClaimError as error:
            log.warning("an ended episode cannot be judged, its reward will be missing: %s", error)
            return
        body = codec.decode_body(event["kind"], event["body"])
        if not awaited(event, body, self._judge):
            return
        with telemetry.span("millrace.reward", headers):
            verdict = await self._pool.judge(body["task"], body["output"] or "")
        VERDICTS.add(1, outcome=(verdict.failure or "judged").partition(":")[0])
        answer = reward_event(event, verdict, self._judge, now_micros(), self._raw, headers)
        await asyncio.wrap_future(self._publisher.publish(answer))

    def _event(self, value: bytes) -> dict[str, Any]:
        name, found = codec.decode(value)
        return codec.decode_as("Event", self._claims.load(found)) if name == "Claim" else found

    def close(self) -> None:
        self._publisher.close()


def run(settings: Settings) -> None:
    """Judge until SIGTERM. Raises RewardError when the verifier cannot be loaded."""
    reward = settings.reward
    pool = VerifierPool(reward.verifier, workers=reward.workers, timeout_s=reward.timeout_s)
    bus = connect(settings)
    raw, events = (full_name(settings.namespace, name) for name in ("raw", "events"))
    judge = Judge(reward.source, reward.verifier, reward.rubric)
    judging = Judging(bus, pool, judge, raw, ClaimStore(settings.claims))

    def close() -> None:
        judging.close()
        pool.close()
        bus.close()

    run_agent(
        settings.kafka,
        group=full_name(settings.namespace, f"reward-{reward.source}"),
        topic=events,
        handle=judging,
        concurrency=IN_FLIGHT,
        data=settings.home / "faust",
        close=close,
    )
