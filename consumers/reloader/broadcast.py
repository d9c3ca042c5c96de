"""Versions straight from the learner into the engine, over a process group of the two: no disk is shared.

The reloader asks the learner that made the version (`broadcast` of its event) for a group, and tells the engine to join
it and to load what comes. The engine hashes what it received before its weights are touched.

Invariants: what cannot be had so is read from the directory instead, in the same swap, and that is said."""

from __future__ import annotations

import base64
import logging

import httpx

from millrace.consumers.reloader.directory import Signature
from millrace.consumers.reloader.transport import Delivery, Events, WeightTransport
from millrace.infra import faults
from millrace.infra.engines.control import Broadcast, EngineControl
from millrace.infra.errors import EngineError, EngineTimeout, EngineUnavailable, ReloadError
from millrace.schemas.records import WeightVersion
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights.delta_files import WEIGHTS
from millrace.trainers.weights.tensorfile import slots

log = logging.getLogger(__name__)

OUTPUT = "lm_head.weight"


class FromLearner(WeightTransport):
    """Over a process group with the learner; `otherwise` where that is not possible."""

    def __init__(self, otherwise: WeightTransport, *, timeout_s: float = 10.0) -> None:
        self._otherwise = otherwise
        self._timeout_s = timeout_s

    async def prepare(
        self, control: EngineControl, event: WeightVersion, events: Events, reference: Signature | None
    ) -> Delivery:
        version = event["version"]
        try:
            offer = await self._ask(control, event)
            signature = _signature(offer, reference)
        except (ReloadError, CorruptCheckpoint, EngineError) as error:
            log.warning("version %d is not broadcast: %s; reading its directory", version, error)
            return await self._otherwise.prepare(control, event, events, reference)

        async def load() -> None:
            try:
                await control.receive(offer)
            except EngineUnavailable:
                raise
            except (EngineError, EngineTimeout) as error:
                log.warning("the broadcast of version %d failed: %s; reading its directory", version, error)
                await (await self._otherwise.prepare(control, event, events, reference)).load()

        return Delivery(signature, load)

    async def on_load(self, version: int) -> None:
        await self._otherwise.on_load(version)

    async def _ask(self, control: EngineControl, event: WeightVersion) -> Broadcast:
        """Have the learner open a group. Raises ReloadError when it does not."""
        url, digest = event["broadcast"], event["files"].get(WEIGHTS)
        if url is None or digest is None:
            raise ReloadError("its learner offers none")
        ranks = await control.ranks()
        request = {"version": event["version"], "digest": event["digest"], "ranks": ranks}
        faults.point("transfer.before_offer")
        try:
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False) as client:
                answer = (await client.post(f"{url}/send", json=request)).raise_for_status().json()
                header = base64.b64decode(answer["header"])
                faults.point("transfer.after_offer")
                return Broadcast(str(answer["host"]), int(answer["port"]), ranks, header, digest)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ReloadError(f"the learner at {url} does not send it ({error or type(error).__name__})") from error


def _signature(offer: Broadcast, reference: Signature | None) -> Signature:
    """Of the tensors that are offered. Raises ReloadError when they are not those of earlier versions."""
    tensors = {slot.name: (slot.dtype, slot.shape) for slot in slots(offer.header)}
    if reference is not None and tensors != reference:
        raise ReloadError("it is of another architecture than earlier versions")
    if OUTPUT not in tensors:
        raise ReloadError(f"it has no {OUTPUT} of its own, which only a load from a directory is known to handle")
    return tensors
