"""Where the ranks of one generation meet before their process group exists: the leader's store, under the roster's key.

Invariants: every process keeps its own store on its advertised port for as long as it lives, so a refused
connection there proves its death; nothing here blocks while the consumer must be polled: waits look every 20 ms and
poll between looks; nobody begins to form before everybody is here; whether they form is said by the leader alone, since
it may have said so when another sees that the group changes: who left then would keep the others waiting in vain.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from millrace.consumers.learner.group.agreement import Roster
from millrace.consumers.learner.group.membership import refuses
from millrace.infra.errors import RegroupError
from millrace.infra.log.history.newest import Head

STORE_TIMEOUT_S = 10.0
LOOK_S = 0.02


class Meeting:
    """The ranks of `roster` in the leader's store. `wait` polls, and raises RegroupError when the group moved."""

    def __init__(self, roster: Roster, local_store: Store, wait: Callable[[], None]) -> None:
        self._roster = roster
        self._wait = wait
        leader = roster.leader
        if roster.rank == 0:
            store: Store = local_store
        else:
            if refuses(leader.host, leader.port):
                raise RegroupError("the leader is gone before the ranks met")
            store = TCPStore(
                leader.host,
                leader.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
            )
        self.store = PrefixStore(roster.key, store)

    def lead(self, head: Head) -> None:
        """Rank 0, once it has fenced and read the ledger: tell the others, and wait until all are here."""
        self._put("head", msgspec.msgpack.encode([head.weights, head.entry]))
        self._until([f"here/{rank}" for rank in range(1, self._roster.world)])
        self._put("go", b"")

    def call_off(self) -> None:
        """Rank 0, when it will not lead: the others need not wait."""
        self._put("off", b"")

    def follow(self) -> Head:
        """Any other rank: say that it is here, and wait for what rank 0 read. Raises RegroupError when it is called
        off, or when the group changed and rank 0 says nothing for `STORE_TIMEOUT_S`."""
        self._put(f"here/{self._roster.rank}", b"")
        try:
            self._until(["head", "go"])
        except RegroupError as moved:
            self._hear(moved)
        weights, entry = msgspec.msgpack.decode(base64.b64decode(self.store.get("head")))
        return Head(weights, entry)

    def _hear(self, change: RegroupError) -> None:
        """Returns when rank 0 says go after all."""
        deadline = time.monotonic() + STORE_TIMEOUT_S
        while not self.store.check(["go"]):
            if self.store.check(["off"]) or time.monotonic() > deadline:
                raise change
            time.sleep(LOOK_S)

    def _until(self, keys: list[str]) -> None:
        while keys and not self.store.check(keys):
            self._wait()

    def _put(self, key: str, value: bytes) -> None:
        self.store.set(key, base64.b64encode(value).decode())
