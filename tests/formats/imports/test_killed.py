"""The command `millrace import` as a process, killed at every point of its writing, over a real broker: once it has
come to its end the log folds to what one undisturbed import of the same rows gives. MILLRACE_IMPORT_KILLS: how many
more kills, each of them at a random record or at a random moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.infra.config import load
from millrace.infra.log.base import Outgoing
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.streams.seal.policy_terms import announce
from tests.formats.imports.test_import import brought, small, told
from tests.support.fault_points import fault_points
from tests.support.imported import ROWS, TALK, write
from tests.support.whole import NAMESPACE, POLICY

HERE = "imports"
KILLS = (
    "import.checked",
    "import.sent:1",
    "import.sent:900",
    "import.written:1",
    "import.committed:2",
    "import.sent:9",
)
ROWS_OF_CHAT = 160
"""more than two transactions of seven events each"""
MORE = int(os.environ.get("MILLRACE_IMPORT_KILLS", "0"))
SEED = 5


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(300 + 30 * MORE)
def test_killed_anywhere_and_begun_again_it_loses_and_doubles_nothing(broker: str, tmp_path: Path) -> None:
    assert {kill.partition(":")[0] for kill in KILLS} == {
        name for name in fault_points("formats") if name.startswith("import.")
    }
    files = [
        write(tmp_path / "chat.jsonl", [{"messages": TALK, "reward": n / 8} for n in range(ROWS_OF_CHAT)]),
        write(tmp_path / "pairs.jsonl", ROWS["trl-preference"]),
    ]
    flags = {"namespace": HERE, "policy.name": POLICY, "kafka.bootstrap": broker, "kafka.local": "false"}
    settings = load(flags={**flags, "home": str(tmp_path / "home"), "topics.slots": "2"})
    command = [sys.executable, "-P", "-m", "millrace.apps.cli.main"]
    for name, value in {**flags, "home": str(tmp_path / "home"), "topics.slots": "2"}.items():
        command += ["--set", f"{name}={value}"]
    command += ["import", *map(str, files)]

    def run(kill: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "MILLRACE_KILL": kill}
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    def killed_at_some_moment(longest_s: float) -> bool:
        """Whether it was killed before it had ended."""
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(chance.uniform(0, longest_s))
        except subprocess.TimeoutExpired:
            process.kill()
        return process.wait() == -signal.SIGKILL

    chance = random.Random(SEED)
    with KafkaBus(broker) as bus:
        bus.ensure_topics(settings.layout.specs())
        refused = run("")
        assert (refused.returncode, "there is no policy" in refused.stderr) == (1, True), refused.stderr
        announce(settings, bus)
        for kill in KILLS:
            assert run(kill).returncode == -signal.SIGKILL
        for _ in range(MORE // 2):
            assert run(f"import.sent:{chance.randint(1, 7 * ROWS_OF_CHAT)}").returncode == -signal.SIGKILL
        longest_s, left = 10.0, MORE - MORE // 2
        while left:
            killed = killed_at_some_moment(longest_s)
            left -= killed
            longest_s *= 1.2 if killed else 0.8
        for _ in range(2):
            done = run("")
            assert (done.returncode, f"{ROWS_OF_CHAT} trajectories" in done.stdout) == (0, True), done.stderr
        with small() as world:
            with world.bus.publisher() as publisher:
                for partition in range(2):
                    for record in bus.read(f"{HERE}.raw", partition):
                        topic = f"{NAMESPACE}.raw"
                        publisher.publish(Outgoing(topic, record.key, record.value, record.headers, partition)).result()
            sent = len(world.decoded("raw"))
            world.drain(10_000 + sent)
            found, letters = told(world), world.decoded("dead-letters")
    with small() as world:
        brought(world, *files)
        once = len(world.decoded("raw"))
        world.drain()
        assert (found, letters) == (told(world), [])
    assert sent > 2 * once, "what was committed before a kill was sent again"
