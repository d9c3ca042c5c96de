"""An engine that joins broadcasts with real groups, in a thread of this process, and keeps what it received."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from millrace.infra.engines.control import Broadcast
from millrace.infra.errors import EngineError
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import broadcast
from tests.consumers.reloader.conftest import ScriptedEngine


class ReceivingEngine(ScriptedEngine):
    """`workers` ranks; `tensors`: what rank 1 holds now, whichever way it came; `spoil` changes the hash it checks."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__()
        self.workers = workers
        self.tensors: dict[str, torch.Tensor] = {}
        self.spoil = False

    async def ranks(self) -> int:
        return self.workers

    async def receive(self, offer: Broadcast) -> None:
        self._call("receive")
        assert self.paused, "received while sampling"
        digest = "0" * 64 if self.spoil else offer.digest
        joined = [
            asyncio.to_thread(
                broadcast.receive, offer.host, offer.port, rank, offer.ranks, offer.header, digest, timeout_s=60
            )
            for rank in range(1, self.workers + 1)
        ]
        try:
            found = await asyncio.gather(*joined)
        except (RuntimeError, CorruptCheckpoint) as error:
            raise EngineError(str(error)) from error
        assert all(torch.equal(each[name], tensor) for each in found for name, tensor in found[0].items())
        self.tensors, self.poisoned = found[0], False

    async def load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        await super().load(folder)
        self.tensors = load_file(folder / "model.safetensors")
