"""One sample of one grant: start its session, run the agent, end the session whatever happened.

Invariants: an episode that began is ended once, with the reason when it failed; while the gateway does not answer, or
no engine behind it could serve the policy, the worker waits and gives nothing up; a cancelled episode (the worker is
going down) is left open, so that the grant is run again by whoever takes over."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from millrace.infra import telemetry
from millrace.producers.client import AsyncSession, GatewayRefused, GatewayUnreachable
from millrace.producers.gateway.episodes.bodies import EndIn, StartIn, post_body
from millrace.producers.rollout.agents import Agent
from millrace.producers.rollout.trouble import Trouble
from millrace.schemas.ids import new_id
from millrace.schemas.records import Grant

logger = logging.getLogger(__name__)

AGAIN_S = 0.5
REASON = 2000
SERVED_S = 1.0
"""how long an engine that could serve is taken to be there"""

_episodes = telemetry.counter("millrace.rollout.episodes", "{episode}", "episodes ended, by status")


class EngineHealth(msgspec.Struct):
    """An engine, as `/health` has it: the version that it serves, if it says so."""

    version: int | None = None


class GatewayHealth(msgspec.Struct):
    """What `/health` says to a key: how each policy stands, and the engines of all."""

    policies: dict[str, str] = {}
    engines: dict[str, EngineHealth] = {}

    def serves(self, policy: str) -> bool:
        """Whether an engine could serve a grant of this policy; True where the gateway has no engines for it."""
        standing = self.policies.get(policy, "")
        is_served = standing == "served" and any(one.version is not None for one in self.engines.values())
        return is_served or not standing


@dataclass(slots=True)
class Runner:
    """Runs samples against one gateway, at most `concurrency` at once. Make and use it in one event loop."""

    agent: Agent
    base_url: str
    api_key: str = ""
    concurrency: int = 8
    timeout_s: float = 120.0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    trouble: Trouble = field(default_factory=Trouble)
    _slots: asyncio.Semaphore = field(init=False)
    _http: aiohttp.ClientSession = field(init=False)
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _served_until: float = 0.0

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.concurrency)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        """Let go of the connections."""
        await self._http.close()

    async def group(self, grant: Grant) -> None:
        """Run every sample that a grant asks for; returns once each of them has ended."""
        await asyncio.gather(*(self.sample(grant, sample) for sample in grant["samples"]))

    async def sample(self, grant: Grant, sample: int) -> None:
        """Run one sample."""
        async with self._slots, self.trouble.turn():
            await self._wait_for_engine(grant["policy"])
            session = await self._start(grant, sample)
            if session is None:
                return
            end = await self._run(session, json.loads(grant["task"]))
            await self._end(session, end)
            _episodes.add(1, status=end["status"])

    async def _wait_for_engine(self, policy: str) -> None:
        """Returns once an engine could serve a grant: one that still loads its model would fail every episode."""
        async with self._looking:
            waits = False
            while time.monotonic() >= self._served_until:
                if (await self._health()).serves(policy):
                    self._served_until = time.monotonic() + SERVED_S
                    return
                if not waits:
                    logger.warning("grants wait: no engine serves a version of policy %s yet", policy)
                waits = True
                await asyncio.sleep(AGAIN_S)

    async def _health(self) -> GatewayHealth:
        """How the gateway is. Where it does not say so, whoever starts a session learns why."""
        url, headers = f"{self.base_url.removesuffix('/v1')}/health", {"authorization": f"Bearer {self.api_key}"}
        try:
            async with self._http.get(url, headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as answer:
                return msgspec.json.decode(await answer.read(), type=GatewayHealth)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
            return GatewayHealth()

    async def _start(self, grant: Grant, sample: int) -> AsyncSession | None:
        """The session of a sample; None when the gateway will never take it."""
        task = json.loads(grant["task"])
        fields = post_body(
            StartIn,
            ticket=grant["ticket"],
            group_size=grant["group_size"],
            sample=sample,
            attempt=new_id(),
            min_version=grant["min_version"],
            deadline=grant["deadline"],
            task_id=grant["prompt_id"],
            task=task,
            awaits=grant["awaits"],
            reward_deadline_ms=grant["reward_deadline_ms"],
        )
        fields["sampling"] = dict(self.sampling)
        while True:
            try:
                return await AsyncSession.start(self.base_url, self.api_key, http=self._http, **fields)
            except GatewayUnreachable as error:
                logger.warning("ticket %d waits for the gateway: %s", grant["ticket"], error)
                await asyncio.sleep(AGAIN_S)
            except GatewayRefused as error:
                logger.error("ticket %d cannot be run: %s", grant["ticket"], error)
                return None

    async def _run(self, session: AsyncSession, task: dict[str, Any]) -> dict[str, Any]:
        """The agent's verdict on itself, as the end of the session takes it."""
        try:
            async with asyncio.timeout(self.timeout_s):
                output = await self.agent(task, self.base_url, session.api_key)
        except TimeoutError:
            reason = f"the agent took longer than {self.timeout_s} s"
            return post_body(EndIn, status="failed", stop_condition="timeout", reason=reason)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:REASON]
            self.trouble.note_failure(session.id, error)
            return post_body(EndIn, status="failed", stop_condition="exception", reason=reason)
        self.trouble.note_success()
        return post_body(EndIn, status="completed", stop_condition="agent", output=output)

    async def _end(self, session: AsyncSession, end: dict[str, Any]) -> None:
        while True:
            try:
                await session.end(**end)
                return
            except GatewayUnreachable as error:
                logger.warning("episode %s waits for the gateway to end: %s", session.id, error)
                await asyncio.sleep(AGAIN_S)
            except GatewayRefused as error:
                # The gateway lost it (its capture log is gone): the group's lease decides.
                logger.error("episode %s could not be ended: %s", session.id, error)
                return
