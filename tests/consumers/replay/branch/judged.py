"""Ends of episodes and rewards of replays, written as refine would admit them, beside trajectories that were fed into a
log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millrace.infra.log.base import Bus, Outgoing
from millrace.infra.log.history.kinds import EVENTS, RAW, TRAJECTORIES
from millrace.infra.log.history.reader import History
from millrace.schemas import codec
from millrace.schemas.records import Trajectory
from millrace.testing.events import Episode


def _write(history: History, events: Iterable[Mapping[str, Any]]) -> None:
    with history.bus.publisher() as publisher:
        for event in events:
            headers = {"kind": str(event["kind"]).encode(), "source": str(event["source"]).encode()}
            headers |= {"policy": history.policy.encode()}
            value = codec.encode("Event", event)
            publisher.publish(Outgoing(history.names[EVENTS], b"local/g", value, headers))
        publisher.flush(60)


def _episode(history: History, trajectory: Trajectory) -> Episode:
    return Episode(trajectory["id"], policy=history.policy, attempt=trajectory["attempt"], group=trajectory["group"])


def end(bus: Bus, namespace: str, policy: str) -> None:
    """The end of every trajectory: its output is the reward that it was sealed with."""
    history = History(bus, namespace, policy)
    rows = [row.record for row in history.rows(TRAJECTORIES)]
    _write(history, (_episode(history, row).end(output=str(row["reward"])) for row in rows))


def judge(
    bus: Bus, namespace: str, policy: str, rubric: str, values: Mapping[str, float | None], source: str, **more: Any
) -> None:
    """Rewards of a replay, by trajectory id. more: fields of the rewards, such as `replay` None for live ones, and `n`
    for another one of the same source."""
    history = History(bus, namespace, policy)
    rows = [row.record for row in history.rows(TRAJECTORIES) if row["id"] in values]
    said = {"source": source, "rubric_version": rubric, "replay": rubric, **more}
    _write(history, (_episode(history, row).reward(values[row["id"]], judge=source, **said) for row in rows))


def admit(bus: Bus, namespace: str, policy: str) -> int:
    """Bring what a replay wrote into `raw` over to `events`; gives how many."""
    history = History(bus, namespace, policy)
    records = [row.record for row in history.rows(RAW)]
    _write(history, records)
    return len(records)
