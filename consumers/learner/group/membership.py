"""This process's membership in the learner group: joining, agreeing on who trains together, expelling the dead.

Invariants: the consumer is polled from one thread, here and nowhere else, and its partitions stay paused (places are
fetched by another reader); the member token of a generation is captured once, when its roster is agreed; a key is used
for one process group at most; a quiet wait lets several joiners make one generation; only a peer that refuses
connections on its advertised port is expelled (a live one that is expelled by mistake would rejoin).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

from millrace.consumers.learner.group.agreement import ANY_WORLD, Need, Roster, address, agree, is_covered
from millrace.infra.errors import RefusedError, RegroupError
from millrace.infra.log.base import LATEST, Bus, GroupView, Member, MemberToken

QUIET_S = 0.2
"""the table must not change for so long"""
MEET_S = 0.02
"""between two looks at the leader's store"""
LOOK_S = 0.05
"""between two looks at the table"""
STANDBY_S = 0.5
"""the same, for a member without a partition while all have an owner"""
PROBE_AFTER_S = 0.25
"""how long an unsettled table is left alone before its members are probed"""
REJOIN_AFTER_S = 2.0
"""how long after a failure a new generation may take before this member makes one, later for higher ranks"""
PROBE_TIMEOUT_S = 0.5
DRAIN = 500
FOREVER_S = 86_400.0


class Membership:
    """One learner's place in the group. Not thread-safe."""

    def __init__(
        self, bus: Bus, group: str, topic: str, client_id: str, session_timeout_s: float, need: Need = ANY_WORLD
    ) -> None:
        self._bus = bus
        self._group = group
        self._topic = topic
        self._client_id = client_id
        self._session_timeout_s = session_timeout_s
        self._need = need
        self._shards = bus.partitions(topic)
        self._used = ""
        self._probed = 0.0
        self._rank = 0
        self._fresh = False
        self._member: Member | None = None
        self.token: MemberToken | None = None
        """of the generation that `settle` agreed on"""

    def join(self) -> None:
        """Subscribe. The first assignment arrives while settling."""
        self._member = self._bus.member(
            self._group,
            self._topic,
            client_id=self._client_id,
            assignor="range",
            session_timeout_s=self._session_timeout_s,
            max_poll_interval_s=FOREVER_S,
            on_assign=self._on_assign,
        )

    def leave(self) -> None:
        """Leave the group at once."""
        member, self._member = self._member, None
        if member is not None:
            member.close()

    def settle(self, stopping: Callable[[], bool]) -> Roster | None:
        """Poll until the members agree on a generation that was not used before, with this one among its ranks or its
        spares; None when asked to stop meanwhile. A member without a partition stands by, here."""
        start = time.monotonic()
        candidate: Roster | None = None
        look = LOOK_S
        since = start
        # After a generation, somebody may have died: look at once. Before the first, peers may still be starting.
        self._probed = 0.0 if self._used else start
        while not stopping():
            self._poll(look)
            now = time.monotonic()
            view = self._bus.group(self._group)
            roster = self._roster(view)
            look = LOOK_S
            if not self._now()[1] and is_covered(view, self._topic, self._shards):
                candidate, start, look = None, now, STANDBY_S
            elif roster is None or roster.key == self._used:
                candidate = None
                if now - self._probed > PROBE_AFTER_S:
                    self._expel_dead(view)
                if roster is not None and now - start > REJOIN_AFTER_S * (1 + self._rank):
                    self.leave()
                    self.join()
                    start = time.monotonic()
            elif candidate is None or candidate.key != roster.key:
                candidate, since = roster, now
            elif now - since >= QUIET_S:
                return self._use(roster)
        return None

    def holds(self, roster: Roster) -> bool:
        """Whether this member still is where the roster says, as of its last poll."""
        token, partitions = self._now()
        return (
            token is not None
            and token.generation == roster.generation
            and partitions == set(roster.self_peer.partitions)
        )

    def poll(self, timeout_s: float = 0.0) -> None:
        """Let callbacks run and the group make progress; whatever is fetched is not ours to use."""
        self._poll(timeout_s)

    def wait(self, roster: Roster) -> None:
        """Poll once while waiting for peers of `roster`. Raises RegroupError when the group has moved on; peers that
        are proven dead are expelled, so that it does."""
        self._poll(MEET_S)
        if not self.holds(roster):
            raise RegroupError("the group changed while its ranks met")
        if time.monotonic() - self._probed > PROBE_AFTER_S:
            self._expel_dead(self._bus.group(self._group))

    def _use(self, roster: Roster) -> Roster | None:
        token, _ = self._now()
        self._used, self.token = roster.key, token
        self._rank = roster.rank
        return roster

    def _poll(self, timeout_s: float) -> None:
        assert self._member is not None, "join first"
        while self._member.poll(DRAIN, timeout_s):
            timeout_s = 0.0
        if self._fresh:
            self._member.pause(self._member.assignment())
            self._fresh = False

    def _on_assign(self, partitions: set[int]) -> Mapping[int, int]:
        """Where to begin: anywhere, since nothing is read here. Asking for the committed offsets would wait for a
        transaction that a dead leader left open, which only our own fence will settle."""
        self._fresh = True
        return dict.fromkeys(partitions, LATEST)

    def _now(self) -> tuple[MemberToken | None, set[int]]:
        assert self._member is not None, "join first"
        try:
            return self._member.token(), self._member.assignment()
        except RefusedError:
            return None, set()

    def _roster(self, view: GroupView) -> Roster | None:
        token, partitions = self._now()
        return agree(view, token, partitions, self._topic, self._shards, self._need) if token is not None else None

    def _expel_dead(self, view: GroupView) -> None:
        token, _ = self._now()
        member_id = token.member_id if token is not None else ""
        for member in view.members:
            if (
                member.member_id != member_id
                and member.client_id != self._client_id
                and refuses(*address(member.client_id))
            ):
                self._bus.expel(self._group, member.member_id)
        self._probed = time.monotonic()


def refuses(host: str, port: int) -> bool:
    """Whether nothing listens there any more: proof that the process which advertised it is dead."""
    try:
        with socket.create_connection((host, port), PROBE_TIMEOUT_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
