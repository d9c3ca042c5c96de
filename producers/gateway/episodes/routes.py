"""The routes of episodes, and of the health of the gateway that keeps them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from millrace.dialects.errors import ApiError
from millrace.infra.config.keys import WORKERS
from millrace.producers.gateway.calls.fleet import EngineTarget
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.calls.policies import SERVED_STANDING
from millrace.producers.gateway.episodes.service import Episodes
from millrace.producers.gateway.http.callers import tenants_of
from millrace.producers.gateway.http.handling import Handler, enter, json_of
from millrace.producers.gateway.sessions.ownership import HOLDER_ONLY

Work = Callable[[Any, bytes], Awaitable[dict[str, Any]]]


class EpisodeRoutes:
    """Those of one gateway. `address`: where sessions are told to come back to, never what a request says of it."""

    def __init__(self, gateway: Gateway, address: str) -> None:
        self.gateway = gateway
        self.address = address
        self.episodes = Episodes(gateway)

    def handlers(self) -> dict[str, Handler]:
        """By the name of the route."""
        return {
            "start": self._start,
            "sessions": self._sessions,
            "reward": self._reward,
            "feedback": self._feedback,
            "events": partial(self._on_session, self.episodes.events),
            "end": partial(self._on_session, self.episodes.end),
            "health": self._health,
        }

    async def _start(self, request: Request) -> Response:
        self.gateway.check_open()
        visit, caller = enter(request, self.gateway.callers)
        body, must_exist = await visit.body(request), HOLDER_ONLY in request.headers
        return json_of(await self.episodes.start(caller, body, f"{self.address}/v1", must_exist=must_exist))

    async def _sessions(self, request: Request) -> Response:
        _, caller = enter(request, self.gateway.callers, "read")
        return json_of({"sessions": self.episodes.of_name(caller, request.query_params.get("name"))})

    async def _reward(self, request: Request) -> Response:
        visit, caller = enter(request, self.gateway.callers, "reward")
        session = self.episodes.find_for_reward(caller, request.path_params["id"], request.headers)
        return json_of(await self.episodes.reward(caller, session, await visit.body(request)))

    async def _feedback(self, request: Request) -> Response:
        visit, caller = enter(request, self.gateway.callers, "reward")
        return json_of(await self.episodes.feedback(caller, await visit.body(request)))

    async def _on_session(self, work: Work, request: Request) -> Response:
        visit, caller = enter(request, self.gateway.callers)
        session = self.episodes.find_own(caller, request.path_params["id"])
        return json_of(await work(session, await visit.body(request)))

    async def _health(self, request: Request) -> Response:
        gateway = self.gateway
        gateway.check_open()
        # No error: a load balancer would turn away rewards and ends of episodes too.
        recorder = gateway.recorder
        down = await recorder.down() if recorder.is_required else None
        policies = gateway.engines.standing()
        status = "capture down" if down is not None else _overall(policies)
        try:
            _, caller = enter(request, gateway.callers, "read")
        except ApiError:
            return json_of({"status": status})  # a load balancer has no key; what is behind is not its business
        sessions, log = gateway.sessions, recorder.log
        targets = [
            one for served_policy in gateway.engines.served.values() for one in served_policy.fleet.targets.values()
        ]
        state: dict[str, Any] = {
            "status": status,
            "policies": policies,
            "sessions": sessions.count[caller.tenant],
            "engines": {target.url: _engine_standing(target) for target in targets},
            "capture": "required" if recorder.is_required else "best-effort",
        }
        # What all tenants do together is for who runs the gateway, and for one that has it to itself.
        tenants = tenants_of(gateway.options, gateway.callers.principals)
        if caller.takes_grants or caller.runs or len(tenants - {WORKERS}) <= 1:
            state |= {
                "sessions": len(sessions.live),
                "unreadable": len(sessions.unreadable),
                "engines": {target.url: _engine_standing(target) | {"running": target.running} for target in targets},
                "lost": recorder.lost,
                "captured": log.end,
                "forwarded": log.acked,
                "waiting_bytes": log.waiting,
            }
        return json_of(state)


def _engine_standing(target: EngineTarget) -> dict[str, Any]:
    """How one engine stands: its version, and what keeps calls from it, if anything does."""
    out: dict[str, Any] = {"version": target.version}
    if target.is_draining:
        out["draining"] = True
    if target.trouble:
        out["trouble"] = target.trouble
    return out


def _overall(policies: Mapping[str, str]) -> str:
    """How a gateway stands whose policies stand so: by name, see `Gateway.standing`."""
    flags = [standing == SERVED_STANDING for standing in policies.values()]
    return "ok" if all(flags) else "partial" if any(flags) else "no engine"
