"""A process that dies at any point of a version's way into an engine, by SIGKILL, on a real broker with real processes.

The learner, the engine and its reloader run; each point of the code is armed once, and whoever passes it dies there and
is started again. At the end the versions are those of a run without a kill, byte for byte."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers import policy_names
from millrace.consumers.reloader.serve import cache_of
from tests.chaos.ways import points_of
from tests.support.ends import FLAGS, Ends
from tests.support.feed import feed
from tests.support.learners import Place, entries

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1800)]
Deploy = Callable[..., Ends]
WHO = {"delta": "learner", "sender": "learner", "reload": "reloader", "transfer": "reloader", "receiver": "engine"}
"""first word of a point -> the process that passes it"""


@pytest.fixture
def deploy(tmp_path: Path, broker: str) -> Iterator[Deploy]:
    made: list[Ends] = []

    def make(**flags: Any) -> Ends:
        made.append(Ends(tmp_path / f"ends-{len(made)}", broker, f"t{uuid.uuid4().hex[:8]}", **flags))
        made[-1].start("learner", "engine", "reloader")
        return made[-1]

    yield make
    for one in made:
        with one:
            pass


def undisturbed(folder: Path, versions: int, **flags: Any) -> list[str]:
    """Digests of the versions that one learner makes of the same groups in this thread, never killed."""
    whole = Place(folder, **{**FLAGS, **flags})
    feed(whole.bus, whole.settings, range(4 * versions))
    whole.learn(versions)
    found = [row["digest"] for row in entries(whole.bus, whole.settings)]
    whole.bus.close()
    return found


def finish(it: Ends, folder: Path, **flags: Any) -> None:
    """What must hold at the end of every history."""
    it.step()
    it.check()
    rows = entries(it.bus, it.settings)
    assert [row["digest"] for row in rows] == undisturbed(folder, it.fed, **flags)
    assert "truncated or changed" not in it.everything()


def test_deltas(deploy: Deploy, tmp_path: Path) -> None:
    flags = {"learner.anchor_every": 100, "engine.interrupt": "abort"}
    it = deploy(**flags)
    it.listen()
    it.step()
    for point in points_of("deltas"):
        assert it.die_at(point) == WHO[point.partition(".")[0]]
    finish(it, tmp_path / "whole", **flags)
    assert {event["mode"] for event in it.events().values()} == {"full", "delta"}
    cache = cache_of(it.settings, it.settings.engine.url)
    assert cache is not None
    assert sorted(path.name.partition("-")[0] for path in cache.iterdir()) == [f"v{it.fed - 1}", f"v{it.fed}"]

    root = policy_names.weights_root(it.settings)
    assert list(root.glob("deltas/.tmp-*")), "one was killed over its draft"
    it.change(**{"learner.keep": 1})
    it.kill("learner")
    it.step()
    it.until(lambda: not [*root.glob(".tmp-*"), *root.glob("deltas/.tmp-*")])
    assert it.serves(it.fed)


def test_broadcasts(deploy: Deploy, tmp_path: Path) -> None:
    flags = {"engine.weights": "broadcast"}
    it = deploy(**flags)
    it.listen()
    it.step()
    for point in points_of("broadcast"):
        assert it.die_at(point) == WHO[point.partition(".")[0]]
    (it.armed / "receiver.between_pieces").touch()
    it.feed()
    it.until(lambda: it.processes["engine"].poll() is not None and it.committed() == it.fed, leave="engine")
    it.feed()
    it.until(lambda: it.committed() == it.fed, leave="engine")  # training goes on without an engine
    finish(it, tmp_path / "whole", **flags)
