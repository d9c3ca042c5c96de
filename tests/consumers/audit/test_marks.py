"""Whoever writes a gateway's next number into raw makes refine skip what the gateway sends under it later. The event
may be valid in every other respect: what was skipped then tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from millrace.consumers.audit import AuditReport, audit
from millrace.infra.log.base import Outgoing
from millrace.infra.log.topics import full_name
from millrace.schemas import codec
from millrace.testing.events import Episode
from millrace.testing.world import CALM, NAMESPACE, World
from tests.support.histories import begin, make_world, plan_of
from tests.support.players import POLICY

SOURCE = "gateway.0"


def put(world: World, episode: Episode, number: int, event: Mapping[str, Any]) -> None:
    """One event under a number of the gateway."""
    headers = {"source": SOURCE.encode(), "source-seq": b"%d" % number}
    out = Outgoing(full_name(NAMESPACE, "raw"), episode.key.encode(), codec.encode_by_name("Event", event), headers)
    with world.bus.publisher() as publisher:
        publisher.publish(out).result()


def history(forged: int | None, sent: int) -> AuditReport:
    """An episode of a start and `sent` calls under the numbers from 0 on. After its start somebody else goes on with
    the chain of a copy, under the number `forged`."""
    plan = plan_of(0)
    with make_world(0, [plan], chances=CALM) as world:
        begin(world, plan)
        episode, copy = (Episode("root", policy=POLICY, source=SOURCE) for _ in range(2))
        put(world, episode, 0, episode.start())
        copy.start()
        world.drain()
        if forged is not None:
            put(world, episode, forged, copy.call("forged"))
        world.drain()
        for number in range(1, sent + 1):
            put(world, episode, number, episode.call(f"reply-{number}"))
        world.drain()
        return audit(world.bus, NAMESPACE, POLICY, release=plan.release)


def test_an_honest_source_is_clean() -> None:
    report = history(None, 3)
    assert report.clean, report.violations[:3]


@pytest.mark.parametrize("forged", [1, 2, 5, 1000])
def test_what_a_forged_number_made_refine_skip_is_named(forged: int) -> None:
    report = history(forged, 3)
    messages = [violation.message for violation in report.finding("dispositions").violations]
    skipped = [message for message in messages if "became nothing" in message or "numbers twice" in message]
    assert len(skipped) == min(forged, 3)
