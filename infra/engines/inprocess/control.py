"""The in-process engine's server as an `EngineControl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from millrace.infra import faults
from millrace.infra.engines.bearer import Key
from millrace.infra.engines.control import Broadcast, EngineLoad, EngineState, HttpControl, PauseMode, TokenRate
from millrace.infra.engines.inprocess import wire
from millrace.infra.errors import EngineError


class InprocessControl(HttpControl):
    """Controls the server at `url`."""

    def __init__(self, url: str, *, key: Key = "", timeout_s: float = 30.0, load_timeout_s: float = 600.0) -> None:
        super().__init__(url, key=key, timeout_s=timeout_s, load_timeout_s=load_timeout_s)
        self._rate = TokenRate()

    async def state(self) -> EngineState:
        state = await self._state()
        return EngineState(state.incarnation, state.label, state.paused)

    async def occupancy(self) -> EngineLoad | None:
        state = await self._state()
        if state.running is None:
            return None  # the server of an older release
        return EngineLoad(state.running, state.waiting, tokens_s=self._rate.since_last(state.tokens))

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._post("/pause", wire.Pause(mode))

    async def resume(self) -> None:
        await self._post("/resume")

    async def load(self, folder: Path) -> None:
        await self._post("/load", wire.Load(str(folder)), self._load_timeout_s)

    async def ranks(self) -> int:
        if not (await self._state()).receives:
            return await super().ranks()
        return 1

    async def receive(self, offer: Broadcast) -> None:
        # One call does what vLLM has three for: whoever dies before it leaves nothing behind.
        faults.point("transfer.after_group")
        faults.point("transfer.after_start")
        await self._post("/receive", wire.Receive(offer.group, offer.notice), self._load_timeout_s)
        faults.point("transfer.after_update")

    async def set_version(self, label: str) -> None:
        await self._post("/label", wire.Label(label))

    async def reset_prefix_cache(self) -> bool:
        await self._post("/recompute")
        return True

    async def abort(self, request_ids: Sequence[str] = ()) -> int:
        answer = await self._post("/abort", wire.Abort(list(request_ids)))
        return msgspec.json.decode(answer, type=wire.AbortCount).count

    async def _state(self) -> wire.ServerState:
        answer = (await self._call("GET", "/state")).content
        try:
            return msgspec.json.decode(answer, type=wire.ServerState)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.url}/state answered {answer[:200]!r}: it is no in-process engine") from error

    async def _post(self, path: str, body: msgspec.Struct | None = None, timeout_s: float | None = None) -> bytes:
        content = b"{}" if body is None else msgspec.json.encode(body)
        timeout = self._client.timeout if timeout_s is None else timeout_s
        return (await self._call("POST", path, content=content, timeout=timeout)).content
