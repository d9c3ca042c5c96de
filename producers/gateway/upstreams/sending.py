"""One request on its way along a chain of upstreams, until one of them answers it.

Invariants: what is tried again, and where, `attempts` decides; an answer that another attempt may better is closed
once that attempt came to something."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from millrace.dialects.errors import ApiError
from millrace.infra.engines.upstream import StreamedReply, UpstreamReply
from millrace.infra.errors import EngineError, EngineTimeout, EngineUnavailable
from millrace.producers.gateway.upstreams import attempts
from millrace.producers.gateway.upstreams.upstreams import Upstream

logger = logging.getLogger(__name__)

R = TypeVar("R", UpstreamReply, StreamedReply)


async def first_answer(
    chain: Sequence[Upstream], send: Callable[[Upstream], Awaitable[R]], caller: str, first_s: float
) -> R:
    """The first answer that no other attempt may better; one that has no words for the request (ApiError) is passed
    over, and what another answered before it counts. `caller`: who asks, for the log of the gateway; `first_s`: the
    wait before a first retry. Raises EngineError where the last attempt got none, ApiError where nobody had words."""
    at, attempt = 0, 0
    before: R | EngineError | None = None
    """what the upstream behind which a fallback is asked came to"""
    while True:
        upstream, attempt = chain[at], attempt + 1
        answer: R | None = None
        attempt_error: EngineError | None = None
        try:
            answer = await send(upstream)
            if not attempts.passing(answer.status):
                await _close(before)
                return answer
            failure = attempts.AttemptFailure(answer.status, attempts.retry_after(answer.headers.get("retry-after")))
        except EngineError as error:
            status = error.status if isinstance(error, EngineUnavailable) else None
            attempt_error, failure = error, attempts.AttemptFailure(status, is_silent=isinstance(error, EngineTimeout))
        except asyncio.CancelledError:
            await _close(before)
            raise
        except ApiError:
            if at + 1 < len(chain):
                at, attempt = at + 1, 0
                continue
            if before is None:
                raise
            return _result_of(before)
        await _close(before)
        before = answer if answer is not None else attempt_error
        then = attempts.after(failure, attempt, upstream.retries, behind=at + 1 < len(chain), first_s=first_s)
        if then == "end":
            return _result_of(before)
        reason = attempt_error or f"status {failure.status}"
        logger.warning("%s of %s: attempt %d failed: %s", upstream.name, caller, attempt, reason)
        if isinstance(then, attempts.Retry):
            await _close(before)
            before = None
            await asyncio.sleep(then.wait_s)
        else:
            at, attempt = at + 1, 0


def _result_of(came_to: R | EngineError | None) -> R:
    """An answer, or its failure raised."""
    assert came_to is not None
    if isinstance(came_to, EngineError):
        raise came_to
    return came_to


async def _close(answer: UpstreamReply | StreamedReply | EngineError | None) -> None:
    if isinstance(answer, StreamedReply):
        async with answer:
            pass
