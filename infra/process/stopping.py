"""How a server learns that it shall stop: SIGTERM, or SIGINT from a keyboard."""

from __future__ import annotations

import asyncio
import signal


def stop_asked() -> asyncio.Event:
    """An event that either signal sets, from now on; for the loop that runs. Neither ends the process by itself any
    more."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    return asked
