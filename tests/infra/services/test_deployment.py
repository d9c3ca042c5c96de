"""Which processes a deployment has, and a whole one up and down on a real broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.bus.connect import connect
from infra.config import Settings, load, variables
from infra.errors import ServiceError
from infra.services import deployment as under_test
from infra.services import leftovers
from infra.services.broker import answers
from infra.services.deployment import Deployment
from infra.services.net import LOCALHOST, free_ports
from infra.services.programs import programs


def settings(**flags: str) -> Settings:
    return load(flags=flags)


def names(made: Settings) -> list[str]:
    return [program.name for program in programs(made, {})]


def test_each_role_runs_once_and_learners_and_rollouts_as_often_as_asked() -> None:
    made = load(flags={"learner.learners": 2, "rollout.agent": "a:b", "rollout.workers": 2})
    assert names(made) == [
        *("broker", "engine", "reload", "gateway", "refine", "reward", "seal", "dispatch"),
        *("learn-0", "learn-1", "rollout-0", "rollout-1"),
    ]


def test_what_you_bring_is_not_started() -> None:
    made = load(flags={"kafka.local": False, "engine.local": False, "learner.learners": 0})
    assert names(made) == ["gateway", "refine", "reward", "seal", "dispatch"]


def test_what_serves_every_policy_may_run_elsewhere() -> None:
    made = load(flags={"kafka.local": False, "engine.local": False, "learner.learners": 0, "shared": False})
    assert names(made) == ["gateway", "reward", "dispatch"]


BEFORE = {"gateway.keys.me.key": "former", "kafka.options.sasl.password": "former"}


@pytest.mark.parametrize(
    ("flags", "stay"),
    [
        ({}, {"broker", "engine", "gateway", "learn-0"}),
        ({"learner.learners": 3, "rollout.workers": 2}, {"broker", "engine", "gateway", "learn-0"}),
        ({"policy.eta": 3}, {"broker"}),
        ({"engine.max_num_seqs": 3}, {"broker"}),
        ({"gateway.idle_timeout_s": 3}, {"broker", "engine"}),
        ({"kafka.bootstrap": "127.0.0.1:1"}, set()),
        ({"gateway.keys.me.key": "former"}, {"broker", "engine", "gateway", "learn-0"}),
        ({"gateway.keys.me.key": "another"}, {"broker", "engine"}),
        ({"kafka.options.sasl.password": "another"}, set()),
    ],
)
def test_a_program_differs_when_what_it_reads_does(flags: dict[str, object], stay: set[str]) -> None:
    before, after = ({p.name: p for p in programs(load(flags=f), {})} for f in (BEFORE, BEFORE | flags))
    watched = ("broker", "engine", "gateway", "learn-0")
    assert {name for name in watched if before[name] == after[name]} == stay
    assert "former" not in str(before)


@pytest.mark.slow
@pytest.mark.kafka
def test_up_and_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kafka, gateway, engine = free_ports(3)
    flags = {
        "home": str(tmp_path / "home"),
        "kafka.bootstrap": f"{LOCALHOST}:{kafka}",
        "gateway.port": str(gateway),
        "engine.url": f"http://{LOCALHOST}:{engine}",
    }
    made = load(flags=flags)
    monkeypatch.setattr(
        under_test, "programs", lambda s, e: [p for p in programs(s, e) if p.name in ("broker", "engine")]
    )
    deployment = Deployment(made, variables(flags))
    try:
        assert deployment.up() == []
        with connect(made) as bus:
            bus.check_topics(made.layout.specs())
        assert {state.name for state in deployment.supervisor.states()} == {"broker", "engine"}
        before = deployment.supervisor.pid("broker")
        deployment.up()
        assert deployment.supervisor.pid("broker") == before
        with pytest.raises(ServiceError, match=r"policy policy runs from .*: for second beside it choose another home"):
            Deployment(load(flags={**flags, "policy.name": "second"}), variables(flags)).up()
        assert deployment.supervisor.pid("broker") == before
    finally:
        deployment.down()
    assert not answers(made.kafka.bootstrap, timeout_s=0.3)
    assert leftovers.find(deployment.supervisor.deployment) == []


@pytest.mark.slow
@pytest.mark.kafka
def test_a_port_that_is_taken_is_named(broker: str, tmp_path: Path) -> None:
    made = load(flags={"home": str(tmp_path), "kafka.bootstrap": broker})
    with pytest.raises(ServiceError, match=r"kafka\.bootstrap"):
        Deployment(made, {}).up()
