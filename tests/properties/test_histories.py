"""P1 to P11 and P13 over random histories of the production runner and stages, unsolicited groups included.

`make histories N=10000` plays that many. A failure names its seed, and
`MILLRACE_HISTORIES_FROM=SEED make histories N=1` plays it again, to the byte."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from millrace.consumers.audit.run import audit
from millrace.testing.world import NAMESPACE
from tests.support.histories import ACTIONS, Told, run
from tests.support.players import POLICY

COUNT = int(os.environ.get("MILLRACE_HISTORIES", "150"))
FIRST = int(os.environ.get("MILLRACE_HISTORIES_FROM", "0"))
CHUNK = 20


def play(seeds: range) -> tuple[list[Told], list[tuple[int, str]]]:
    """(histories that kept every law, (seed, message) of those that broke one). Runs in a process of its own."""
    logging.disable(logging.WARNING)
    told, broken = [], []
    for seed in seeds:
        try:
            told.append(run(seed))
        except AssertionError as error:
            broken.append((seed, str(error)))
        except Exception as error:
            broken.append((seed, f"{type(error).__name__}: {error}"))
    return told, broken


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_law_holds_in_every_history(capsys):
    chunks = [range(at, min(at + CHUNK, FIRST + COUNT)) for at in range(FIRST, FIRST + COUNT, CHUNK)]
    told: list[Told] = []
    broken: list[tuple[int, str]] = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for good, bad in pool.map(play, chunks):
            told += good
            broken += bad
    total = {name: sum(getattr(t, name) for t in told) for name in ("events", "versions", "ready", "zombies")}
    with capsys.disabled():
        print(f"\n{len(told)} histories of at least {min((t.events for t in told), default=0)} records: {total}")
    assert not broken, "\n".join(f"MILLRACE_HISTORIES_FROM={seed}: {message}" for seed, message in broken[:5])
    assert all(t.events >= 200 and t.actions >= ACTIONS for t in told)
    assert total["versions"] >= 2 * COUNT, "histories must learn, else they prove nothing"


def test_a_seed_is_one_history():
    assert run(7) == run(7)


@pytest.mark.slow
def test_no_stage_mutates_what_it_reads():
    for seed in range(5):
        run(seed, strict=True)


@pytest.mark.slow
def test_every_turn_of_every_stage_folds_again_to_what_it_wrote():
    for seed in range(5):
        run(seed, inspect=lambda world, plan: world.verify())


@pytest.mark.slow
def test_the_audit_of_a_history_is_clean():
    def inspect(world, plan):
        report = audit(world.bus, NAMESPACE, POLICY, release=plan.release)
        broken = {finding.law: finding.violations[0] for finding in report.findings if not finding.holds}
        assert broken == {}
        assert sum(finding.checked for finding in report.findings) > 500

    for seed in range(10):
        run(seed, inspect=inspect)
