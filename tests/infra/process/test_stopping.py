"""Each signal that ends a server sets the event, and the process goes on to end in its own way."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from millrace.infra.process.stopping import stop_asked


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_sets_the_event_and_ends_nothing(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    asked = stop_asked()
    try:
        assert not asked.is_set()
        os.kill(os.getpid(), number)
        await asked.wait()
    finally:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
        signal.signal(number, before)
