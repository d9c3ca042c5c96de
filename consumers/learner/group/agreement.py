"""Who trains together, read off the consumer group's table: every member that sees the same table agrees.

A layout trains with multiples of so many ranks (its unit), beside those that serve roles of their own. The largest
number that is here and fits trains; who is left over is a spare, which waits for the group to change.

Invariants: a roster exists only for a stable table that covers every partition; members are ordered by lowest
partition, the first of them are the ranks, the others the spares; the key names one generation of one table, so that a
process group formed under it can hold nobody else. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.infra.log.base import GroupMember, GroupView, MemberToken


@dataclass(frozen=True, slots=True)
class Need:
    """How many ranks a layout takes: `serving` of them play roles of their own, the others share each batch and come in
    multiples of `unit`, once at least; of those that share, `limit` train and the others are spares, 0 for no limit."""

    unit: int = 1
    serving: int = 0
    limit: int = 0

    @property
    def fewest(self) -> int:
        return self.unit + self.serving

    def most(self, here: int) -> int:
        """The largest number among so many that can train, 0 where they are too few."""
        if here < self.fewest:
            return 0
        sharing = min(here - self.serving, self.limit or here)
        return self.serving + sharing - sharing % self.unit


ANY_WORLD = Need()
"""of a layout that any number of ranks makes"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A member that owns at least one partition, and where its rendezvous store listens."""

    member_id: str
    client_id: str
    host: str
    port: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Roster:
    """Who trains together in one generation: `peers`, by rank; and who waits: `spares`. `rank` is this process's place
    among both."""

    key: str
    generation: int
    peers: tuple[Peer, ...]
    rank: int
    spares: tuple[Peer, ...] = ()

    @property
    def leader(self) -> Peer:
        return self.peers[0]

    @property
    def members(self) -> tuple[Peer, ...]:
        """Ranks, then spares."""
        return self.peers + self.spares

    @property
    def self_peer(self) -> Peer:
        """This process."""
        return self.members[self.rank]

    @property
    def trains(self) -> bool:
        """Whether this process is a rank."""
        return self.rank < self.world

    @property
    def world(self) -> int:
        return len(self.peers)

    def owner(self, partition: int) -> int | None:
        """The rank that owns a partition, None where a spare does."""
        return next((rank for rank, peer in enumerate(self.peers) if partition in peer.partitions), None)


def address(client_id: str) -> tuple[str, int]:
    """(host, port) from a client id `...@host:port`. Raises ValueError for the client id of anything but a learner."""
    host, _, port = client_id.rpartition("@")[2].rpartition(":")
    return host, int(port)


def client_id(name: str, host: str, port: int) -> str:
    """The client id that advertises where a learner's rendezvous store listens."""
    return f"{name}@{host}:{port}"


def agree(
    view: GroupView, token: MemberToken, partitions: set[int], topic: str, shards: int, need: Need = ANY_WORLD
) -> Roster | None:
    """The roster of a group's table as one member sees it, or None while it is not settled or this one stands by.

    view: the table; token: this member's membership; partitions: those it was assigned; shards: S of `topic`; need: how
    many can train."""
    rows = {member.member_id: _partitions(member, topic) for member in view.members}
    if not partitions or token.generation < 0 or not is_covered(view, topic, shards):
        return None
    if set(rows.get(token.member_id, ())) != partitions:
        return None
    members = sorted((m for m in view.members if rows[m.member_id]), key=lambda m: rows[m.member_id][0])
    peers = tuple(Peer(m.member_id, m.client_id, *address(m.client_id), rows[m.member_id]) for m in members)
    rank = next(rank for rank, peer in enumerate(peers) if peer.member_id == token.member_id)
    train = need.most(len(peers))
    return Roster(_key(token.generation, view.members, rows), token.generation, peers[:train], rank, peers[train:])


def is_covered(view: GroupView, topic: str, shards: int) -> bool:
    """Whether the table is stable and every partition has exactly one owner."""
    partitions = sorted(partition for member in view.members for partition in _partitions(member, topic))
    return view.stable and partitions == list(range(shards))


def _partitions(member: GroupMember, topic: str) -> tuple[int, ...]:
    return tuple(sorted(partition for name, partition in member.partitions if name == topic))


def _key(generation: int, members: Sequence[GroupMember], rows: dict[str, tuple[int, ...]]) -> str:
    table = sorted((rows[m.member_id], m.member_id, m.client_id) for m in members)
    return f"{generation}-{hashlib.sha256(repr(table).encode()).hexdigest()[:12]}"
