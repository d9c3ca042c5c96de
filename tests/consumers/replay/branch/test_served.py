"""A branch is a policy like any other: an engine serves its newest version, and a learner goes on from there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from millrace.consumers.audit import audit
from millrace.consumers.reloader import shell
from millrace.consumers.reloader.shell import Reloader
from millrace.consumers.replay.branch.job import BranchOptions
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.inprocess.engine import InprocessEngine
from tests.support.branches import branch, events, play
from tests.support.engines import DirectControl, complete, differences, until
from tests.support.learners import Place

pytestmark = pytest.mark.slow

PROMPT = [1, 22, 3, 4, 5]
EXACT = 2e-5
LAWS = ("versions", "tiles", "weights", "ledger-chain", "leaders", "files")
"""those about versions: groups are fed here, as no stage wrote them"""


@asynccontextmanager
async def reloading(place: Place, engine: InprocessEngine) -> AsyncIterator[Reloader]:
    """A reloader that keeps the engine on the newest version of the branch."""
    reloader = Reloader(place.bus, DirectControl(engine), namespace="t", policy="b", worker="engine-0")
    stop = asyncio.Event()
    task = asyncio.create_task(reloader.run(stop))
    try:
        yield reloader
    finally:
        stop.set()
        await task


async def serves(engine: InprocessEngine, version: int, folder: Path, former: Path) -> None:
    """Its tokens are those of a version, by their label and by their log-probabilities."""
    (reply,) = await complete(engine, PROMPT, Sampling(20, ignore_eos=True))
    assert {span.label for span in reply.spans} == {f"b@{version}"}
    assert max(differences(folder, PROMPT, reply.token_ids, reply.logprobs)) < EXACT
    assert max(differences(former, PROMPT, reply.token_ids, reply.logprobs)) > 10 * EXACT, "versions can be told apart"


async def test_an_engine_serves_a_branch_and_a_learner_goes_on_from_it(
    place: Place, beginner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "LOOK_S", 0.02)
    last, _ = branch(place.bus, place.settings, steps=5, save_every=5)
    assert last["version"] == 1
    trained = Path(last["uri"])
    engine = InprocessEngine(beginner, seed=0)
    async with reloading(place, engine) as reloader:
        await until(lambda: reloader.served == 1)
        await serves(engine, 1, trained, beginner)
        place.settings = BranchOptions("b").settings(place.settings)  # what `[policy] name = "b"` is
        play(place.bus, place.settings, trained, range(place.settings.policy.batch), size=4, version=1)
        place.learn(2)
        await until(lambda: reloader.served == 2)
        learned = events(place.bus, place.settings)[2]
        assert (learned["parent"], learned["selection"], learned["seq_lo"]) == (1, None, 0)
        await serves(engine, 2, Path(learned["uri"]), trained)
    report = audit(place.bus, "t", "b", files=True)
    assert [(law, report.finding(law).violations) for law in LAWS if not report.finding(law).holds] == []
