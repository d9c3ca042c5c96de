"""Members that differ are told apart before they meet, spares among them: by the ledger, else by the first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.consumers import policy_names
from millrace.consumers.learner.group.agreement import Peer, Roster, client_id
from millrace.consumers.learner.group.identity import identify
from millrace.consumers.learner.step.mismatch import refuse
from millrace.infra.errors import RefusedMember, RegroupError
from tests.support.feed import feed
from tests.support.learners import Place


def roster(rank: int, *shown: str, world: int) -> Roster:
    peers = tuple(Peer(f"m{i}", client_id(f"learner/{one}", "h", 1), "h", 1, (i,)) for i, one in enumerate(shown))
    return Roster("key", 1, peers[:world], rank, peers[world:])


def parts(place: Place) -> Any:
    return SimpleNamespace(bus=place.bus, topics=policy_names.topics(place.settings))


def test_members_that_are_alike_ask_nobody() -> None:
    refuse(SimpleNamespace(), roster(0, "a-b-c", "a-b-c", "a-b-c", world=2))  # type: ignore[arg-type]


def test_the_one_that_differs_is_refused_and_the_others_wait_for_it_to_go(place: Callable[..., Place]) -> None:
    """A spare of another layout: it counts other ranks than the rest do."""
    for rank in (0, 1):
        with pytest.raises(RegroupError, match=r"refused m2 \(its configuration\)"):
            refuse(parts(place()), roster(rank, "a-b-c", "a-b-c", "x-b-c", world=2))
    with pytest.raises(RefusedMember, match="learner m2 differs from the others in configuration"):
        refuse(parts(place()), roster(2, "a-b-c", "a-b-c", "x-b-c", world=2))


def test_the_ledger_says_who_is_right(place: Callable[..., Place]) -> None:
    it = place()
    feed(it.bus, it.settings, range(4))
    it.learn(1)
    mine = identify(it.settings).tag
    other = "x" + mine[1:] if mine[0] != "x" else "y" + mine[1:]
    with pytest.raises(RefusedMember):
        refuse(parts(it), roster(0, other, mine, world=2))
    with pytest.raises(RegroupError, match="refused m0"):
        refuse(parts(it), roster(1, other, mine, world=2))
