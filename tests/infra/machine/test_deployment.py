"""Which processes a deployment has, and a whole one up and down on a real broker."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from millrace.infra.config import Settings, load, variables
from millrace.infra.connect import connect
from millrace.infra.errors import ConfigError, ServiceError
from millrace.infra.gateway_processes import INDEX, note
from millrace.infra.machine import deployment as under_test
from millrace.infra.machine import leftovers
from millrace.infra.machine import programs as programs_module
from millrace.infra.machine.broker import answers
from millrace.infra.machine.deployment import Deployment
from millrace.infra.machine.programs import READS, programs
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.schemas.ids import now_micros


def settings(**flags: str) -> Settings:
    return load(flags=flags)


def names(made: Settings) -> list[str]:
    return [program.name for program in programs(made, {})]


def test_each_role_runs_once_and_learners_and_rollouts_as_often_as_asked() -> None:
    made = load(flags={"learner.learners": 2, "rollout.agent": "a:b", "rollout.workers": 2})
    assert names(made) == [
        *("broker", "engine", "reload", "gateway", "refine", "reward", "seal", "dispatch"),
        *("learn-0", "learn-1", "rollout-0", "rollout-1", "warehouse"),
    ]


def test_what_you_bring_is_not_started() -> None:
    made = load(flags={"kafka.local": False, "engine.local": False, "learner.learners": 0})
    assert names(made) == ["gateway", "refine", "reward", "seal", "dispatch", "warehouse"]
    assert "warehouse" not in names(load(flags={"warehouse.enabled": False}))


def test_a_gateway_of_several_processes_and_those_of_a_larger_one_before(tmp_path: Path) -> None:
    def gateways(processes: int) -> dict[str, tuple[str, bool]]:
        made = load(flags={"home": str(tmp_path), "gateway.processes": str(processes)})
        return {
            program.name: (program.environment.get(INDEX, "0"), program.revives)
            for program in programs(made, {})
            if program.name.startswith("gateway")
        }

    assert gateways(1) == {"gateway": ("0", True)}
    assert gateways(3) == {"gateway": ("0", True), "gateway-1": ("1", True), "gateway-2": ("2", True)}
    note(load(flags={"home": str(tmp_path), "gateway.processes": "3"}), now_micros())
    (tmp_path / "capture-2").mkdir()
    assert gateways(2) == {"gateway": ("0", True), "gateway-1": ("1", True), "gateway-2": ("2", False)}


def test_spans_are_taken_where_that_is_asked_for() -> None:
    assert "otlp" not in names(load())
    assert "otlp" in names(load(flags={"otlp.enabled": True}))
    assert under_test.ports(load(flags={"otlp.enabled": True}))["otlp.port"] == 4318
    with pytest.raises(ConfigError, match=r"\[otlp\] host .* reachable from other machines"):
        load(flags={"otlp.host": "0.0.0.0"})


def test_what_serves_every_policy_may_run_elsewhere() -> None:
    made = load(flags={"kafka.local": False, "engine.local": False, "learner.learners": 0, "shared": False})
    assert names(made) == ["gateway", "reward", "dispatch"]


BEFORE = {"gateway.keys.me.key": "former", "kafka.options.sasl.password": "former"}


@pytest.mark.parametrize(
    ("flags", "stay"),
    [
        ({}, {"broker", "engine", "gateway", "learn-0"}),
        ({"learner.learners": 3, "rollout.workers": 2}, {"broker", "engine", "gateway", "learn-0"}),
        ({"policy.eta": 3}, {"broker", "engine", "gateway"}),
        ({"policy.awaits": ["judge"]}, {"broker", "engine"}),
        ({"learner.lr": 0.1}, {"broker", "engine", "gateway"}),
        ({"reward.rubric": "2"}, {"broker", "engine", "gateway", "learn-0"}),
        ({"engine.max_num_seqs": 3}, {"broker", "gateway", "learn-0"}),
        ({"engine.max_model_len": 3}, {"broker", "learn-0"}),
        ({"gateway.idle_timeout_s": 3}, {"broker", "engine", "learn-0"}),
        ({"kafka.bootstrap": "127.0.0.1:1"}, set()),
        ({"gateway.keys.me.key": "former"}, {"broker", "engine", "gateway", "learn-0"}),
        ({"gateway.keys.me.key": "another"}, {"broker", "engine", "learn-0"}),
        ({"kafka.options.sasl.password": "another"}, set()),
    ],
)
def test_a_program_differs_when_what_it_reads_does(flags: dict[str, object], stay: set[str]) -> None:
    before, after = ({p.name: p for p in programs(load(flags=f), {})} for f in (BEFORE, BEFORE | flags))
    watched = ("broker", "engine", "gateway", "learn-0")
    assert {name for name in watched if before[name] == after[name]} == stay
    assert "former" not in str(before)


ROOMS = {
    "engine": ["infra/machine/local.py"],
    "reload": ["consumers/reloader"],
    "gateway": ["producers/gateway", "producers/capture"],
    "refine": ["streams/serve.py:refine", "streams/refine"],
    "seal": ["streams/serve.py:seal", "streams/seal"],
    "dispatch": ["streams/serve.py:dispatch", "streams/dispatch"],
    "reward": ["streams/reward"],
    "learn": ["consumers/learner", "consumers/policy_names.py", "consumers/version_zero.py", "trainers"],
    "rollout": ["producers/rollout", "producers/tasks"],
    "warehouse": ["consumers/warehouse"],
    "otlp": ["producers/intake/otlp", "producers/capture"],
}
"""where the code of a role lies; behind a colon a word in the names of its functions"""
FOLLOWS = {
    "weights": ("namespace", "objects", "policy.name"),
    "claims": ("namespace", "objects"),
    "adapters": ("learner",),
    "rollout_key": ("gateway.keys", "rollout.key"),
    "warehouse_home": ("home", "namespace", "warehouse"),
    "otlp_home": ("home", "namespace", "otlp"),
    "layout": ("namespace", "policy.name", "topics"),
}
"""properties of the settings, and what they are made of"""


def read_by(room: str) -> set[str]:
    """The settings that the code of a room names, as section.key."""
    name, _, word = room.partition(":")
    path = Path(programs_module.__file__).parents[2] / name
    found = set()
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (isinstance(node, ast.FunctionDef) and word in node.name) or (not word and isinstance(node, ast.Module)):
                found |= set(re.findall(r"(?<![\w.])settings\.([a-z]\w*(?:\.[a-z]\w*)?)", ast.unparse(node)))
    sections = Settings.model_fields
    named = {one for one in found if not hasattr(BaseModel, one.partition(".")[2] or "-")}  # no method of a section
    plain = {one if "." in one else f"{one}." for one in named}
    return {one for one in plain if one.partition(".")[0] in sections or one.partition(".")[0] in FOLLOWS}


@pytest.mark.parametrize("role", ROOMS)
def test_what_a_role_reads_is_on_its_list(role: str) -> None:
    """Else a change of it would leave the role with the former value."""
    listed = READS[role]
    for room in ROOMS[role]:
        for name in read_by(room):
            section = name.partition(".")[0]
            for wanted in FOLLOWS.get(section, (name.rstrip("."),)):
                whole = wanted.partition(".")[0]
                if role == "engine" and (whole == "learner" or section == "adapters" or wanted == "policy.eta"):
                    continue  # read where versions are adapters, and counted there
                parts = [one for one in listed if one.startswith(f"{whole}.")]
                assert whole in listed or wanted in listed or ("." not in wanted and parts), f"{role} reads {wanted}"


def test_a_setting_of_adapters_restarts_their_engine() -> None:
    lora = {"learner.lora": {"rank": 8, "publish": "adapter"}}
    for change in ({"policy.eta": 5}, {"learner.lora": {"rank": 16, "publish": "adapter"}}):
        before, after = (programs(load(flags=flags), {}) for flags in (lora, {**lora, **change}))
        assert [p.name for p, q in zip(before, after, strict=True) if p != q].count("engine") == 1


@pytest.mark.slow
@pytest.mark.kafka
def test_up_and_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kafka, gateway, engine, warehouse = free_ports(4)
    flags = {
        "home": str(tmp_path / "home"),
        "kafka.bootstrap": f"{LOCALHOST}:{kafka}",
        "gateway.port": str(gateway),
        "engine.url": f"http://{LOCALHOST}:{engine}",
        "warehouse.port": str(warehouse),
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
