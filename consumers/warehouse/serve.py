"""The process `millrace warehouse`: brings the log of a namespace into tables and answers queries.

Invariants: it yields to whatever trains and serves: it runs at low priority, and nobody waits for it; the endpoint
answers for as long as the directory is held (a server by URL answers for itself, and several processes share it); a
query that the engine does not end is ended with the process, which begins anew at once, under its own id."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from millrace.consumers.warehouse.endpoint.serve import open_endpoint
from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.ingest.shares import AllPartitions, GroupShares, Shares
from millrace.consumers.warehouse.open_store import open_for_rows
from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.infra.config import Settings
from millrace.infra.connect import claims, connect
from millrace.infra.errors import WarehouseHeld
from millrace.infra.heartbeat import Heartbeat, unless_in
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.bus import ArchivedBus
from millrace.infra.principals.watch import PrincipalWatch
from millrace.infra.process.net import LOCALHOST

log = logging.getLogger(__name__)

NICE = 10
AGAIN_S = 0.5


def run(settings: Settings) -> None:
    """Take in what the log holds and what comes, until SIGTERM. Raises WarehouseHeld where another process holds the
    directory."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    url = f"http://{LOCALHOST}:{settings.warehouse.port}"
    archived_bus = ArchivedBus(connect(settings), Archive(settings.archive_root))
    with open_store_at(settings, url) as store, archived_bus as bus, ExitStack() as closing:
        name = f"warehouse-{socket.gethostname()}" + (f"-{os.getpid()}" if store.is_shared else "")
        ending = threading.Event()
        if isinstance(store, TableDirectory):
            principals = PrincipalWatch(bus, settings, name)
            principals.start()
            closing.callback(principals.close)
            closing.callback(open_endpoint(store.handle, settings, partial(begin_anew, ending), principals).close)
        shares: Shares = GroupShares(bus, settings.namespace, name) if store.is_shared else AllPartitions()
        ingest = Ingest(bus, store, settings.namespace, claims(settings).behind, shares)
        beat = Heartbeat(
            bus,
            settings.namespace,
            worker=name,
            role="warehouse",
            policy=settings.policy.name,
            url=url,
            standing=unless_in(lambda: ingest.trouble),
        )
        for close in (beat.close, shares.close, ending.set):
            closing.callback(close)
        beat.start()
        attend(ingest.follow)


def open_store_at(settings: Settings, url: str) -> Store:
    """The store, once whoever only looks into its directory has ended. Raises WarehouseHeld for another warehouse."""
    is_told = False
    while True:
        try:
            return open_for_rows(settings, url)
        except WarehouseHeld as held:
            if held.url:
                raise
            if not is_told:
                log.info("%s", held)
            is_told = True
            time.sleep(AGAIN_S)


def begin_anew(ending: threading.Event) -> None:
    """Become a fresh process of the same command and id. What was committed to the tables stays, and is gone on from;
    who asks meanwhile waits for as long as a start takes. Once `ending` is set, end instead."""
    log.error(
        "the engine does not let go of a query that is past [warehouse] query_seconds: it is ended with the process"
    )
    if ending.is_set():
        os._exit(128 + signal.SIGTERM)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            os.set_inheritable(int(name), int(name) <= 2)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def attend(follow: Callable[[threading.Event], None]) -> None:
    """Run `follow` in a thread of its own, so that a signal is noticed at once and the block under way is ended well.
    Raises what it raises, or what a signal raises here, once it has returned."""
    over, end = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            follow(over)
        except BaseException as error:  # raised again by who waits: none may end this thread, and not the process
            errors.append(error)
        finally:
            end.set()

    thread = threading.Thread(target=work, name="ingest")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        thread.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Not `thread.join`: of a signal that raises within it Python makes a thread that has ended, however alive.
        while not end.wait(0.5):
            pass
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]
