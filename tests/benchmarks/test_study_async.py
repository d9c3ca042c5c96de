"""The study of asynchrony in a small form: its loop against closed forms, the optimum and the production runner."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.study_async import real, records, study
from benchmarks.study_async.__main__ import main
from benchmarks.study_async.optimum import optimum
from benchmarks.study_async.regimes import BATCH, GROUP_SIZE, RATES, REGIMES, SCALE, SMALL, STEP_TOKENS
from benchmarks.study_async.rule import bounds, engines_for, longest
from benchmarks.study_async.simulation import (
    Delays,
    Engines,
    Learners,
    Lengths,
    Policy,
    Simulation,
    Step,
    period,
    staleness,
)
from millrace.infra.log.memory.bus import MemoryBus
from millrace.testing.world import CALM, World
from millrace.trainers.batches.allocation import ReadyGroup
from tests.support.folding import Bench


def takes(seconds: float) -> Step:
    """A step that always takes so long."""
    return lambda version, groups: seconds


small = settings(max_examples=25, deadline=None)
times_of = st.lists(st.integers(1, 9), min_size=4, max_size=8).filter(lambda times: len(times) % 2 == 0)


@small
@given(times=st.lists(st.integers(1, 50), min_size=6, max_size=6), step_s=st.integers(0, 20))
def test_eta_zero_is_the_synchronous_closed_form(times: list[int], step_s: int) -> None:
    real = study.finish(times, slots=2, batch=2, step_s=step_s, eta=0)
    assert real == pytest.approx(sum(max(times[at : at + 2]) + step_s for at in (0, 2, 4)))


@small
@given(times=times_of, slots=st.integers(1, 2), step_s=st.integers(0, 5), eta=st.integers(0, 2))
def test_production_never_beats_the_optimum(times: list[int], slots: int, step_s: int, eta: int) -> None:
    real = study.finish(times, slots, 2, step_s, eta)
    in_line = optimum(times, slots, 2, step_s, eta, in_line_order=True)
    assert real >= in_line - 1e-9
    assert in_line >= optimum(times, slots, 2, step_s, eta)


@small
@given(times=times_of, slots=st.integers(1, 2), step_s=st.integers(0, 5), eta=st.integers(0, 2), in_line=st.booleans())
def test_more_places_and_a_larger_eta_never_harm_the_optimum(
    times: list[int], slots: int, step_s: int, eta: int, in_line: bool
) -> None:
    best = optimum(times, slots, 2, step_s, eta, in_line_order=in_line)
    assert optimum(times, slots + 1, 2, step_s, eta, in_line_order=in_line) <= best
    assert optimum(times, slots, 2, step_s, eta + 1, in_line_order=in_line) <= best
    assert best >= max(sum(times) / slots, len(times) // 2 * step_s)


@small
@given(
    reply=st.integers(1, 9),
    batch=st.integers(1, 4),
    slots=st.integers(1, 6),
    step_s=st.integers(0, 9),
    eta=st.integers(0, 4),
    release=st.sampled_from(("reserve", "soft")),
)
def test_where_replies_are_alike_more_places_and_a_larger_eta_never_harm_production(
    reply: int, batch: int, slots: int, step_s: int, eta: int, release: str
) -> None:
    """No order of them is better than another, so nothing can be lost by it."""
    times = [reply] * 8 * batch
    real = study.finish(times, slots, batch, step_s, eta, release)
    assert study.finish(times, slots + 1, batch, step_s, eta, release) <= real + 1e-9
    assert study.finish(times, slots, batch, step_s, eta + 1, release) <= real + 1e-9


def test_the_optimum_of_an_instance_that_one_can_do_by_hand() -> None:
    # One place, nothing to overlap but training: 1 + 1, train 4 beside 3, then 3 more (a second task), train 4.
    assert optimum([1, 1, 3, 3], slots=1, batch=2, training=4, eta=1) == 1 + 1 + 3 + 3 + 4
    assert optimum([1, 1, 3, 3], slots=1, batch=2, training=4, eta=0) == 1 + 1 + 4 + 3 + 3 + 4
    # In line order the long ones come first, in separate batches.
    assert optimum([5, 1, 5, 1], slots=2, batch=2, training=0, eta=0, in_line_order=True) == 10
    assert optimum([5, 1, 5, 1], slots=2, batch=2, training=0, eta=0) == 6


@small
@given(
    eta=st.integers(0, 4),
    batch=st.integers(1, 5),
    size=st.integers(1, 3),
    engines=st.integers(1, 4),
    load_s=st.sampled_from((0.0, 2.0)),
    seed=st.integers(0, 1000),
)
def test_nothing_older_than_eta_is_trained_and_engines_never_harm(
    eta: int, batch: int, size: int, engines: int, load_s: float, seed: int
) -> None:
    fleet = Engines(engines, 4, 1.0, 0.1, load_s)
    ends = []
    for one in (fleet, replace(fleet, count=4 * engines)):
        lengths = Lengths(5, 1.0, 40, seed)
        versions = Simulation(Policy(batch, eta, size), one, lengths, takes(3)).run(8)
        assert 0 <= staleness(versions) <= eta
        assert all(step.begin < step.end for step in versions)
        ends.append(versions[-1].end)
    assert ends[1] <= ends[0] * 1.05


def test_soft_is_faster_than_the_bound_allows() -> None:
    hard, soft = (Simulation(Policy(8, 1, 1, release), *SMALL, takes(2)).run(30) for release in ("reserve", "soft"))
    assert staleness(hard) == 1 < staleness(soft)
    assert soft[-1].end < hard[-1].end


def test_replies_that_share_an_engine_slow_each_other_and_wait_for_weights() -> None:
    def run(load_s: float) -> list[float]:
        engines = Engines(1, 2, 1.0, 0.5, load_s)
        lengths = Lengths(10, 0)
        return [step.end for step in Simulation(Policy(4, 0), engines, lengths, takes(1)).run(2)]

    assert run(0) == pytest.approx([2 * 10 * (1 + 2 * 0.5) + 1, 2 * (2 * 10 * (1 + 2 * 0.5) + 1)])
    assert run(3)[1] == pytest.approx(run(0)[1] + 3)


def test_delays_lie_between_the_roles() -> None:
    delays = Delays(grant_s=1, resolve_s=2, seal_s=100, commit_s=1000)
    first, second = Simulation(Policy(2, 0), Engines(1, 2, 1.0), lambda *_: 5.0, takes(7), delays).run(2)
    # Two grants, the second one a second later; its group is complete, and resolved, last.
    assert first.end == 2 + 5 + 100 + 2 + 7 + 1  # the first group's resolution ends a second before the second's
    assert second.end == first.end + 1000 + first.end


def test_a_simulation_that_cannot_go_on_says_so() -> None:
    with pytest.raises(RuntimeError, match="at rest"):
        Simulation(Policy(2, 0), Engines(1, 2, 1.0), lambda *_: 5.0, takes(7), prompts=3).run(2)


def test_ranks_share_a_step_as_the_manifest_deals_it() -> None:
    groups = [ReadyGroup(seq, tokens) for seq, tokens in enumerate((40, 10, 10, 20))]
    assert Learners(1, 0.5, fixed_s=3).seconds(0, groups) == 3 + 40
    assert Learners(2, 0.5, fixed_s=3, reduce_s=1).seconds(0, groups) == 3 + 20 + 1
    assert Learners(2, 0.5, reduce_s=1, minibatches=2).seconds(0, groups) == 20 + 10 + 2


def test_the_runner_of_production_orders_as_the_simulation_does(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    fold = Bench.record
    monkeypatch.setattr(Bench, "record", lambda self, *what: turns.append((what, out := fold(self, *what))) or out)
    Simulation(Policy(3, 2), Engines(2, 2, 1.0), Lengths(5, 1.0), takes(4)).run(6)
    topics = {topic: 1 for (topic, *_), _ in turns} | {f"p.{name}": 1 for name in ("grants", "resolutions")}
    with World(0, topics | {"decisions": 1, "dlq": 1}, [records.dispatcher], workers=1, chances=CALM) as world:
        for what, _ in turns:
            world.send(*what)
            world.drain()
        for name, topic in (("Grant", "grants"), ("Resolution", "resolutions")):
            simulated = [emit.record for _, emits in turns for emit in emits if emit.name == name]
            written = world.decoded(f"p.{topic}")
            keys = ("ticket", "min_version", "deadline") if name == "Grant" else ("kind", "ticket", "seq", "deadline")
            assert [[r[key] for key in keys] for r in written] == [[r[key] for key in keys] for r in simulated]
            assert len(written) > 18


def test_dispatch_orders_groups_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "QUIET_S", 0.2)
    assert study.groups_per_second(MemoryBus(), time.process_time, 4, 1, rounds=2, size=2) > 0


def test_the_longest_of_many() -> None:
    lengths = Lengths(100, 0.8)
    assert longest(lengths, 1) == pytest.approx(100, rel=0.01)
    assert longest(lengths, 1) < longest(lengths, 10) < longest(lengths, 100)
    assert longest(replace(lengths, most=150), 10_000) == pytest.approx(150, rel=0.01)
    assert longest(Lengths(7, 0), 50) == 7
    draws = [max(lengths(ticket, sample) for sample in range(10)) for ticket in range(1000)]
    assert longest(lengths, 10) == pytest.approx(sum(draws) / 1000, rel=0.05)


@small
@given(
    eta=st.integers(0, 8),
    batch=st.integers(1, 600),
    size=st.integers(1, 16),
    step_s=st.floats(1, 500),
    at=st.floats(1, 99),
)
def test_the_rule_gives_the_fewest_engines_that_are_near_enough(
    eta: int, batch: int, size: int, step_s: float, at: float
) -> None:
    policy, engines, lengths = Policy(batch, eta, size), Engines(1, 16, 1.0), Lengths(at, 0.8, 4 * at)

    def seconds(count: int) -> float:
        return bounds(policy, replace(engines, count=count), lengths, step_s).period

    count, best = engines_for(policy, engines, lengths, step_s), seconds(1 << 20)
    assert seconds(count) <= 1.1 * best
    assert count == 1 or seconds(count - 1) > 1.1 * best


@small
@given(
    eta=st.integers(0, 8),
    batch=st.integers(1, 600),
    size=st.integers(1, 16),
    count=st.integers(1, 500),
    crowd_s=st.sampled_from((0.0, 0.01)),
    step_s=st.floats(1, 500),
    release=st.sampled_from(("reserve", "soft")),
)
def test_by_the_rule_engines_and_eta_never_harm_and_no_version_is_faster_than_its_step(
    eta: int, batch: int, size: int, count: int, crowd_s: float, step_s: float, release: str
) -> None:
    def seconds(eta: int, count: int) -> float:
        engines = Engines(count, 16, 1.0, crowd_s)
        return bounds(Policy(batch, eta, size, release), engines, Lengths(20, 0.8, 80), step_s).period

    now = seconds(eta, count)
    assert now >= step_s
    assert seconds(eta, count + 1) <= now * (1 + 1e-9)
    assert seconds(eta + 1, count) <= now * (1 + 1e-9)


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_the_rule_is_near_the_simulation(eta: int) -> None:
    policy, engines, lengths = Policy(16, eta, 4), Engines(4, 8, 0.1, 0.004), Lengths(100, 0.6, 500)
    versions = Simulation(policy, engines, lengths, takes(12)).run(20)
    assert bounds(policy, engines, lengths, 12).period == pytest.approx(period(versions, 8), rel=0.2)


def test_the_regimes_are_those_of_the_paper() -> None:
    first = REGIMES[0]
    assert first.asynchronous_h * 3600 / first.steps * RATES[2] * 1000 == pytest.approx(STEP_TOKENS, rel=0.01)
    for regime in REGIMES:
        engines, lengths, learners = regime.parts()
        policy = Policy(BATCH // SCALE, 0, GROUP_SIZE)
        step_s = study.step_of(policy, lengths, learners)
        assert step_s == pytest.approx(regime.training_s, rel=0.01)
        rule = bounds(policy, engines, lengths, step_s)
        assert rule.period == pytest.approx(regime.synchronous_s, rel=0.01)


def test_service_times_come_out_of_a_log_and_give_its_times_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log that a run with one place, replies of 2 s and .5 s between them would leave."""
    policy = Policy(2, 1)
    delays = Delays(seal_s=0.25, commit_s=0.125)
    replies = [2.0 + 0.5 * (n > 0) for n in range(8)]
    versions = Simulation(policy, Engines(1, 1, 1.0), lambda n, _: replies[n], takes(1), delays).run(3)
    log: dict[str, list[real.Logged]] = {name: [] for name in ("events", "grants", "completions", "resolutions")}
    log["weights"] = [(0.0, {"batch": 2, "eta": 1, "group_size": 1})]
    log["ledger"] = [(0.0, {"version": 0})]
    log["ledger"] += [(step.end, {"version": n}) for n, step in enumerate(versions, 1)]
    for n in range(6):
        start, group = 2.5 * n, f"g{n}"
        for kind, at in (("episode_started", start), ("episode_ended", start + 2)):
            event = {"kind": kind, "attempt": f"a{n}", "group": group, "event_time": round(at * 1e6)}
            log["events"].append((at, event))
        log["completions"].append((start + 2.25, {"kind": "complete", "group": group, "ticket": n}))
        log["resolutions"].append((start + 2.25, {"kind": "ready", "group": group, "ticket": n, "seq": n}))
    for ticket in range(6):
        version = max(0, ticket // 2 - 1)
        granted = versions[version - 1].end + 0.125 if version else 0.0
        log["grants"].append((granted, {"min_version": version, "ticket": ticket}))
    run = real.measure(log)
    assert (run.policy, run.places) == (policy, 1)
    assert run.replies == pytest.approx({(n, 0): seconds for n, seconds in enumerate(replies[:6])})
    assert run.delays == Delays(seal_s=pytest.approx(0.25), commit_s=pytest.approx(0.125))
    assert [run.step(n, ()) for n in range(3)] == pytest.approx([1, 1, 1])
    for was, simulated in list(real.compare(run).values())[:-1]:
        assert simulated == pytest.approx(was)
    home = tmp_path / "eta1-engines1-batch48"
    home.mkdir()
    (home / real.OVER).touch()
    monkeypatch.setattr(real, "read", lambda home: log)
    monkeypatch.setattr(sys, "argv", ["study", "--real", str(tmp_path), "--eta", "1"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert capsys.readouterr().out.splitlines()[-1].count("(1.000)") == 5
    log["ledger"][-1] = (99, {"version": 3})  # as if the learners had stood still
    log["resolutions"][-1] = (98, log["resolutions"][-1][1])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code


def test_points_are_kept_tabled_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.jsonl"

    def points() -> study.Iterator[study.Point]:
        for release in ("reserve", "soft"):
            for eta in study.ETAS:
                yield (
                    {"release": release, "step_s": 2, "eta": eta},
                    lambda eta=eta: {"period": 8 / (eta + 1), "oldest": eta},
                )

    monkeypatch.setitem(study.TABLES, "small", points)
    monkeypatch.setattr(sys, "argv", ["study", "--out", str(out), "--tables", "small"])
    main()
    first = out.read_text()
    assert first.count("\n") == 10
    main()
    assert out.read_text() == first
    assert "| reserve | 2 | 1.00 (0) | 2.00 (1) | 3.00 (2) | 5.00 (4) | 9.00 (8) |" in capsys.readouterr().out


def test_it_answers_for_numbers_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--groups 8 --group-size 2 --generation-s 10 --train-s 30 --concurrency 4 --simulate"
    monkeypatch.setattr(sys, "argv", ["study", *flags.split()])
    main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["0", "1", "2", "4", "8"]
    assert all(float(row[2]) == pytest.approx(float(row[5]), rel=0.25) for row in rows)
    monkeypatch.setattr(sys, "argv", ["study"])
    with pytest.raises(SystemExit):
        main()
