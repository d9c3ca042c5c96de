"""The stages as processes on a real broker, and what the settings make of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.bus.base import Outgoing
from infra.bus.kafka import KafkaBus
from infra.config import load
from infra.topics import full_name
from schemas import codec
from schemas.ids import new_id
from streams.serve import dispatch_of, seal_of
from tests.support.events import Episode

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from infra.config import load
from streams import serve
if __name__ == "__main__":
    getattr(serve, sys.argv[1])(load(Path(sys.argv[2])))
"""


def test_settings_reach_the_stages(tmp_path):
    settings = load(flags={"home": str(tmp_path), "policy.name": "mine", "policy.short_groups": "top-up"})
    assert dispatch_of(settings).primary == "mine.completions"
    assert seal_of(settings)._rules.short == "top-up"


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
        processes = [
            subprocess.Popen([sys.executable, str(program), name, str(config)], env=environment)
            for name in ("run_refine", "run_seal", "run_dispatch")
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
            for process in processes:
                process.send_signal(signal.SIGTERM)
            assert [process.wait(30) for process in processes] == [0, 0, 0]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert (trajectory["reward"], trajectory["tokens"]) == (1.0, 2)
    assert [reason for reason in trajectory["excluded"] if reason.startswith("b:withheld")]


def wait(bus, settings, topic, name):
    """The first records of a topic, once there are any."""
    full = full_name(settings.namespace, topic)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = [record for p in range(bus.partitions(full)) for record in bus.read(full, p)]
        if found:
            return [codec.decode_as(name, record.value or b"") for record in found]
        time.sleep(0.2)
    raise AssertionError(f"nothing came to {topic}")
