"""A judge behind an API that upstreams of the gateway speak: asks it, and asks again where it is busy or away.

Invariants: every judgement ends, in time, with a verdict or with a labelled failure (`timeout`, `unavailable`,
`refused: STATUS`, `unreadable`); a reply that came is paid for and is not asked for again, whatever it says."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from millrace.infra.config import RewardJudge
from millrace.infra.engines.upstream import TextUpstream, UpstreamReply
from millrace.infra.errors import EngineTimeout, EngineUnavailable, RewardError
from millrace.schemas.json_values import JsonObject
from millrace.streams.reward import rubric
from millrace.streams.reward.dialects import APIS
from millrace.streams.reward.pool import Verdict

TIMEOUT = Verdict(None, {}, None, None, "timeout")
UNAVAILABLE = Verdict(None, {}, None, None, "unavailable")
NO_CONVERSATION = Verdict(None, {}, None, None, "no_conversation")
CONVERSATION = "conversation"
"""of an episode that is judged: all its calls, as JSON text"""
BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""statuses after which another try may work"""


class _Busy(Exception):
    """The judge answered that it cannot answer."""


class AskedJudge:
    """The judge of `[reward.judge]`. It judges several at once, in any event loop."""

    def __init__(self, options: RewardJudge, timeout_s: float) -> None:
        """timeout_s bounds a judgement, all its tries together. Raises RewardError where no judge is described."""
        for name in ("url", "model", "rubric"):
            if not getattr(options, name):
                raise RewardError(f"verifier judge: set {name} under [reward.judge]")
        try:
            self.rubric = Path(options.rubric).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RewardError(f"[reward.judge] rubric {options.rubric} cannot be read: {error}") from error
        if not self.rubric:
            raise RewardError(f"[reward.judge] rubric {options.rubric} is empty")
        self._options = options
        self._timeout_s = timeout_s
        self._api = APIS[options.speaks]
        self._prices = rubric.JudgePrices(options.price_prompt, options.price_completion)

    @property
    def version(self) -> str:
        """Names the model, and what it is told."""
        return rubric.version(self._options.model, self.rubric, conversation=self._options.conversation)

    @property
    def reads(self) -> int:
        """Bytes of a conversation that it reads, 0: none of it."""
        return self._options.conversation_bytes if self._options.conversation else 0

    async def judge(self, task: str, output: str, episode: JsonObject) -> Verdict:
        """The verdict on an output. `task` is JSON text. Never raises for what the judge does."""
        options, value = self._options, episode.get(CONVERSATION) if self.reads else None
        talk = value if isinstance(value, str) else None
        if self.reads and talk is None:
            return NO_CONVERSATION
        body = rubric.request(self.rubric, options.model, task, output, options.max_tokens, self._api, talk)
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._ask(body)
        except (TimeoutError, EngineTimeout):
            return TIMEOUT
        except (EngineUnavailable, _Busy):
            return UNAVAILABLE
        if reply.status != 200:
            return Verdict(None, {}, None, None, f"refused: {reply.status}")
        return rubric.verdict(reply.body, rubric.number(self.rubric, task, output, talk), self._prices, self._api)

    async def _ask(self, body: bytes) -> UpstreamReply:
        """The reply, of the last try where others found the judge busy or away."""
        options, api = self._options, self._api
        key = options.key.get_secret_value()
        upstream = TextUpstream(options.url, key, key_header=options.key_header, idle_s=self._timeout_s)
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type((EngineUnavailable, _Busy)),
                stop=stop_after_attempt(options.tries),
                wait=wait_random_exponential(0.2, max=10),
                reraise=True,
            ):
                with attempt:
                    reply = await upstream.ask(api.path, body, api.headers)
                    if reply.status in BUSY:
                        raise _Busy
                    return reply
        finally:
            await upstream.close()
        raise AssertionError("tenacity either returns or raises")

    def close(self) -> None:
        """Nothing is held between judgements."""
