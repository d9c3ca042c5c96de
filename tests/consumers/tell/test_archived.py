"""`trajectory` and `lineage` say the same of a log of which only the archive is left."""

from __future__ import annotations

from pathlib import Path

from millrace.consumers.tell.command import account_of, lineage_in
from millrace.consumers.tell.topics import PolicyTopics
from millrace.infra.log.base import Bus
from millrace.infra.log.history.kinds import TRAJECTORIES
from millrace.infra.log.history.reader import History
from millrace.infra.log.history.rows import as_stored
from tests.consumers.test_archive import archived
from tests.support.conversations import Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY


def told(bus: Bus, ids: list[str], tasks: list[str]) -> list[object]:
    """All that both say of these trajectories, of these tasks and of version 2."""
    topics = PolicyTopics(bus, NS, POLICY, as_stored)
    shown = [account_of(topics, one).as_json() for one in ids]
    led = [lineage_in(PolicyTopics(bus, NS, POLICY), what).json for what in ["2", *ids]]
    return [shown, led, [lineage_in(PolicyTopics(bus, NS, POLICY), task, task=True).json for task in tasks]]


def test_a_log_that_was_cut_is_told_as_it_was(tmp_path: Path) -> None:
    made = Conversations(1)
    past = History(made.bus, NS, POLICY)
    rows = list(past.rows(TRAJECTORIES))[:3]
    ids, tasks = [row["id"] for row in rows], [row["task_id"] for row in rows]
    assert len(ids) == 3
    before = told(made.bus, ids, tasks)
    both = archived(made, tmp_path)
    assert not [one for p in past.partitions(TRAJECTORIES) for one in made.bus.read(made.topic("trajectories"), p)]
    assert told(both, ids, tasks) == before
