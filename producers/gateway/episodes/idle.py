"""Episodes that nothing happens in for too long are ended here.

Invariants: one that a grant asked for is abandoned, any other is completed; one that has no record yet is gone without
a trace; while the log takes no end, an episode stays."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from millrace.dialects.errors import ApiError
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.schemas.ids import now_micros
from millrace.schemas.records import EpisodeStatus


async def end_idle_episodes(gateway: Gateway) -> None:
    """End them, and forget stored responses that nobody used for too long. Runs until it is cancelled."""
    timeout_s, sessions = gateway.options.idle_timeout_s, gateway.sessions
    while True:
        await asyncio.sleep(min(1.0, timeout_s / 4))
        sessions.replies.stored.sweep(now_micros())
        for session in sessions.idle(timeout_s):
            await asyncio.sleep(0)  # there may be thousands
            if not session.is_silent(timeout_s) or session.has_ended:
                continue
            if session.step == 0:
                sessions.discard(session)
                continue
            status: EpisodeStatus = "abandoned" if session.has_grant else "completed"
            with suppress(ApiError):  # the log is full: it is as idle at the next look
                await gateway.end(session, status=status, stop_condition="idle")
