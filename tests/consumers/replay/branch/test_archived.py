"""A branch of a history that only the archive still has learns from the same items, to the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from millrace.consumers import policy_names
from millrace.consumers.replay.branch import selection_file
from millrace.consumers.replay.branch.job import BranchOptions
from millrace.infra.errors import HistoryGone
from millrace.infra.log.history.kinds import TRAJECTORIES
from millrace.infra.log.history.reader import History
from tests.consumers.archived import cut
from tests.support.branches import branch, violations
from tests.support.learners import Place

pytestmark = pytest.mark.slow

SHORT = {"steps": 2, "save_every": 2, "lr": 3e-4}


def chosen(place: Place, name: str) -> selection_file.KeptItems:
    return selection_file.read(policy_names.weights_root(BranchOptions(name).settings(place.settings)))


def test_it_learns_the_same_from_the_archive_and_refuses_what_is_nowhere(place: Place, tmp_path: Path) -> None:
    whole, _ = branch(place.bus, place.settings, "whole", **SHORT)
    past = History(place.bus, place.settings.namespace, place.settings.policy.name)
    topic = past.names[TRAJECTORIES]
    both = cut(place.bus, place.settings.namespace, tmp_path / "archive", only=topic)
    assert not [one for p in past.partitions(TRAJECTORIES) for one in place.bus.read(topic, p)]
    archived, _ = branch(both, place.settings, "archived", **SHORT)
    assert archived["digest"] == whole["digest"]
    assert replace(chosen(place, "archived"), as_of=None) == replace(chosen(place, "whole"), as_of=None)
    assert violations(both, place.settings, "archived") == []
    gone = rf"{topic}\[0\]: offsets 0 to \d+ are neither in the topic nor in the archive"
    for anyway in (False, True):  # which is about the reach of samples that are there, never about lost ones
        with pytest.raises(HistoryGone, match=gone):
            branch(place.bus, place.settings, "never", anyway=anyway, **SHORT)
    assert not [name for name in place.bus.topics("t.") if ".never." in name], "and nothing is announced"
