"""The stages as processes on a real broker, and what the settings make of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from millrace.infra.config import load
from millrace.infra.log.base import Outgoing
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import full_name, turns_of
from millrace.schemas import codec
from millrace.schemas.ids import new_id
from millrace.streams.seal.policy_terms import announce, terms_of
from millrace.streams.serve import dispatch_of, seal_of
from millrace.testing.events import Episode

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from millrace.infra.config import load
from millrace.streams import serve
if __name__ == "__main__":
    getattr(serve, sys.argv[1])(load(Path(sys.argv[2])))
"""


def test_settings_reach_the_stages(tmp_path):
    settings = load(flags={"home": str(tmp_path), "policy.name": "mine", "policy.short_groups": "top-up"})
    assert dispatch_of(settings).primary == "mine.completions"
    assert seal_of(settings).sides == ("decisions",)
    assert terms_of(settings) == {"short_groups": "top-up", "patience_ms": 300_000}


@pytest.mark.slow
@pytest.mark.kafka
def test_each_stage_runs_as_a_process_until_it_is_told_to_stop(broker, tmp_path):
    flags = {"namespace": f"s{new_id()[-12:]}", "kafka.bootstrap": broker, "home": str(tmp_path)}
    settings = load(flags=flags)
    config = tmp_path / "millrace.toml"
    config.write_text(f'namespace = "{flags["namespace"]}"\nhome = "{tmp_path}"\n[kafka]\nbootstrap = "{broker}"\n')
    program = tmp_path / "stage.py"
    program.write_text(PROGRAM)
    with KafkaBus(broker) as bus:
        bus.ensure_topics(settings.layout.specs())
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        stages = ("refine", "seal", f"{settings.policy.name}.dispatch")
        processes = [
            subprocess.Popen(
                [sys.executable, str(program), f"run_{name.rpartition('.')[2]}", str(config)], env=environment
            )
            for name in stages
        ]
        try:
            episode = Episode("r1", policy=settings.policy.name, source="gateway-0")
            token = "ghp_16C7e42F292c6912E7710c838347Ae178B4a"
            events = [episode.start(), episode.call("a", text="sort 3 1 2"), episode.call("b", keep=5, text=token)]
            with bus.publisher() as publisher:
                for n, event in enumerate([*events, episode.end(), episode.reward(1.0, judge=None)]):
                    headers = {"source": b"gateway-0", "source-seq": b"%d" % n}
                    value = codec.encode("Event", event)
                    publisher.publish(Outgoing(full_name(settings.namespace, "raw"), b"local/r1", value, headers))
                publisher.flush()
            (trajectory,) = wait(bus, settings, f"{settings.policy.name}.trajectories", "Trajectory")
            wait(bus, settings, f"{settings.policy.name}.completions", "Completion")
            joined(bus, settings.namespace, zip(stages, processes, strict=True))
            for process in processes:
                process.send_signal(signal.SIGTERM)
            assert [process.wait(120) for process in processes] == [0, 0, 0]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert (trajectory["reward"], trajectory["tokens"]) == (1.0, 2)
    assert [reason for reason in trajectory["excluded"] if reason.startswith("b:withheld")]


@pytest.mark.slow
@pytest.mark.kafka
def test_two_policies_share_refine_and_seal_and_nothing_else(broker, tmp_path):
    namespace = f"s{new_id()[-12:]}"
    program = tmp_path / "stage.py"
    program.write_text(PROGRAM)
    made = {}
    for policy in ("one", "two"):
        flags = {"namespace": namespace, "kafka.bootstrap": broker, "home": str(tmp_path), "policy.name": policy}
        made[policy] = load(flags=flags)
        lines = [f'namespace = "{namespace}"', f'home = "{tmp_path}"', "[kafka]", f'bootstrap = "{broker}"']
        (tmp_path / f"{policy}.toml").write_text("\n".join([*lines, "[policy]", f'name = "{policy}"']))
    with KafkaBus(broker) as bus:
        for settings in made.values():
            bus.ensure_topics(settings.layout.specs())
        assert [announce(settings, bus) for settings in [*made.values(), *made.values()]] == [True, True, False, False]
        # Seal runs from both files: each process owns a slot, and serves both policies.
        roles = [("run_refine", "one"), *((role, name) for role in ("run_seal", "run_dispatch") for name in made)]
        stages = ["refine", "seal", "seal", *(f"{policy}.dispatch" for policy in made)]
        processes = [
            subprocess.Popen(
                [sys.executable, str(program), role, str(tmp_path / f"{policy}.toml")],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            for role, policy in roles
        ]
        try:
            with bus.publisher() as publisher:
                for policy in made:
                    for ticket in range(4):
                        episode = Episode(f"{policy}-{ticket}", policy=policy, ticket=ticket)
                        events = [episode.start(), episode.call(f"{policy}-c{ticket}"), episode.end()]
                        for event in [*events, episode.reward(1.0)]:
                            out = Outgoing(
                                full_name(namespace, "raw"), episode.key.encode(), codec.encode("Event", event)
                            )
                            publisher.publish(out)
                publisher.flush()
            for policy, settings in made.items():
                sealed = wait(bus, settings, f"{policy}.trajectories", "Trajectory", 4)
                assert {row["id"] for row in sealed} == {f"{policy}-{ticket}" for ticket in range(4)}
                turns = wait(bus, settings, turns_of(f"{policy}.dispatch"), "Turn")
                assert {span["topic"] for turn in turns for span in turn["ranges"]} <= {
                    *(f"{policy}.{kind}" for kind in ("completions", "prompts", "ledger", "weights")),
                    "decisions",
                }
            joined(bus, namespace, zip(stages, processes, strict=True))
            for process in processes:
                process.send_signal(signal.SIGTERM)
            assert [process.wait(120) for process in processes] == [0] * len(roles)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def joined(bus, namespace, stages):
    """Return once the group of each stage has its processes as its only members: from before they join they end well
    when they are asked to."""
    wanted = defaultdict(set)
    for stage, process in stages:
        wanted[stage].add(f"{stage}-{process.pid}")
    deadline = time.monotonic() + 120
    for stage, clients in wanted.items():
        while (found := {member.client_id for member in bus.group(f"{namespace}.{stage}").members}) != clients:
            assert time.monotonic() < deadline, f"members of {stage} are {found}, not {clients}"
            time.sleep(0.2)


def wait(bus, settings, topic, name, count=1):
    """The records of a topic, once there are so many."""
    full = full_name(settings.namespace, topic)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = [record for p in range(bus.partitions(full)) for record in bus.read(full, p)]
        if len(found) >= count:
            return [codec.decode_as(name, record.value or b"") for record in found]
        time.sleep(0.2)
    raise AssertionError(f"nothing came to {topic}")
