"""The end of a session that waits in a spool: behind its events, and no loss where the gateway has it already."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millrace.producers.intake.sender import ReportSender
from millrace.producers.intake.spool import Spool
from tests.support.mcp_captured import recorded, until


async def test_an_end_that_was_taken_before_is_let_go_of_and_counted_as_no_loss(tmp_path: Path) -> None:
    """As whoever was killed between the gateway's answer and its own note leaves it."""
    async with recorded(tmp_path / "gateway") as w:
        session = await w.start()
        spool, told = Spool(tmp_path / "spool"), list[str]()
        seen = {"kind": "observation", "content": "x", "media_type": "text/plain", "origin": "a2a:message"}
        for event in (seen, {"kind": "end", "status": "failed"}, {"kind": "end", "status": "failed"}):
            assert spool.put(event, session["api_key"], f"{w.url}/v1")
        sender = ReportSender(spool, told.append)
        sender.start()
        await until(lambda: spool.log.acked == spool.log.end)
        kept = w.gateway.sessions.ended.pop(session["session"])  # as it forgets those that ended long ago
        assert spool.put({"kind": "end", "status": "failed"}, session["api_key"], f"{w.url}/v1")
        await until(lambda: spool.log.acked == spool.log.end)
        w.gateway.sessions.ended[kept.id] = kept
        await asyncio.to_thread(sender.close, 10.0)
        assert (sender.refused, told) == (0, [])
        kinds = [event["kind"] for event in w.events(session["session"])]
        assert kinds == ["episode_started", "observation", "episode_ended"]
        assert w.events(session["session"])[-1]["data"]["status"] == "failed"
