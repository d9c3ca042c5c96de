"""One request on its way along a chain of upstreams, until one of them answers it.

Invariants: what is tried again, and where, `attempts` decides; an answer that another attempt may better is closed
before that attempt begins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from millrace.infra.engines.upstream import StreamedReply, UpstreamReply
from millrace.infra.errors import EngineError, EngineTimeout, EngineUnavailable
from millrace.producers.gateway.upstreams import attempts
from millrace.producers.gateway.upstreams.upstreams import Upstream

logger = logging.getLogger(__name__)

R = TypeVar("R", UpstreamReply, StreamedReply)


async def first_answer(
    chain: Sequence[Upstream], send: Callable[[Upstream], Awaitable[R]], whose: str, first_s: float
) -> R:
    """The first answer that no other attempt may better. `whose`: who asks, for the log of the gateway; `first_s`: the
    wait before a first retry. Raises EngineError where the last attempt got none."""
    at, tried = 0, 0
    while True:
        upstream, tried = chain[at], tried + 1
        answer: R | None = None
        failed: EngineError | None = None
        try:
            answer = await send(upstream)
            if not attempts.passing(answer.status):
                return answer
            wait = attempts.retry_after(answer.headers.get("retry-after"))
            failure = attempts.Failure(answer.status, wait)
        except EngineError as error:
            status = error.status if isinstance(error, EngineUnavailable) else None
            failed, failure = error, attempts.Failure(status, silent=isinstance(error, EngineTimeout))
        then = attempts.after(failure, tried, upstream.retries, behind=at + 1 < len(chain), first_s=first_s)
        if then == "end":
            if answer is None:
                assert failed is not None
                raise failed
            return answer
        what = failed or f"status {failure.status}"
        logger.warning("%s of %s: attempt %d failed: %s", upstream.name, whose, tried, what)
        if isinstance(answer, StreamedReply):
            async with answer:
                pass
        if isinstance(then, attempts.Again):
            await asyncio.sleep(then.wait_s)
        else:
            at, tried = at + 1, 0
