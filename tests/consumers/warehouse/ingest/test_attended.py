"""A signal ends the ingest well: whoever waits for it closes nothing that it still works with."""

from __future__ import annotations

import signal
import threading

import pytest

from millrace.consumers.warehouse.serve import attend


class Ended(Exception):
    """What the signal raises."""


def test_a_signal_waits_for_the_block_under_way() -> None:
    gone, seen = threading.Event(), list[bool]()

    def follow(over: threading.Event) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        assert over.wait(60)
        seen.append(gone.wait(0.5))

    def end(number: int, frame: object) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(Ended):
            attend(follow)
        gone.set()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [False]


def test_what_the_ingest_raises_is_raised() -> None:
    def follow(over: threading.Event) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        attend(follow)
