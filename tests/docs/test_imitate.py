"""docs/imitate.md, typed from top to bottom in this process, over topics in memory: a provider's answers pass the
gateway, are governed and sealed, and a small model that imitates the best of them does the provider's work."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch
from typer.testing import CliRunner

from millrace.apps.cli import evaluation
from millrace.apps.cli.main import app
from millrace.consumers import evaluation as committed
from millrace.consumers import version_zero
from millrace.consumers.audit import command as audit
from millrace.consumers.replay.branch import command as branch
from millrace.infra.config import Settings, load
from millrace.infra.log.base import Outgoing
from millrace.infra.log.history.kinds import TRAJECTORIES, WEIGHTS
from millrace.infra.log.history.reader import History
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.topics import full_name
from millrace.infra.process.net import free_ports
from millrace.infra.stages.live import StageRunner
from millrace.infra.stages.slot import RunnerSettings
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.upstreams.upstreams import make as make_upstreams
from millrace.streams.refine.stage import Refine
from millrace.streams.seal.policy_terms import announce
from millrace.streams.serve import seal_of
from tests.support.documents import IMITATE, ROOT, RUN_BY, blocks
from tests.support.gateway_world import RAW, world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "imitate.md"
SHOWN = blocks(PAGE)
PROVIDER, WORK = (block.text for block in SHOWN if block.language == "python")
COMMANDS = [command for block in SHOWN if block.language == "sh" for command in block.commands]
MAKERS = [command for command in COMMANDS if command.startswith("python -m millrace.apps.demo.")]
OURS = [command for command in COMMANDS if RUN_BY[command] == IMITATE and command not in MAKERS]
run = CliRunner().invoke


@contextmanager
def running(program: str) -> Iterator[None]:
    """A program of the page, as long as the block lasts."""
    with Popen([sys.executable, "-c", program]) as process:
        try:
            yield
        finally:
            process.kill()


async def captured(settings: Settings, folder: Path, bus: MemoryBus, program: str) -> None:
    """Run the agent before a gateway of these settings; what the gateway captured is then in `raw`."""
    upstreams = make_upstreams(settings, os.environ)
    options = GatewayOptions.of(settings, 512)
    assert (upstreams is not None, options.policy) == (True, "policy")
    keys = {"keys": options.keys, "verifiers": options.verifiers, "reward_deadline_ms": options.reward_deadline_ms}
    async with world(folder, None, None, upstream=upstreams, **keys) as w:
        done = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program.replace("http://127.0.0.1:8900", w.url), cwd=folder, stderr=PIPE
        )
        _, error = await done.communicate()
        assert done.returncode == 0, error.decode()
    assert upstreams is not None
    await upstreams.close()
    with bus.publisher() as publisher:
        for partition in range(w.bus.partitions(RAW)):
            for one in w.bus.read(RAW, partition):
                raw = full_name(settings.namespace, "raw")
                publisher.publish(Outgoing(raw, one.key, one.value, dict(one.headers), partition))
        publisher.flush(60)


def sealed(settings: Settings, bus: MemoryBus) -> None:
    """Let the production stages fold all there is."""
    refine = Refine(settings.governance, [], slots=settings.topics.slots, name_key=b"names")
    runners = [StageRunner(bus, stage, RunnerSettings(settings.namespace)) for stage in (refine, seal_of(settings))]
    idle = 0
    while idle < 20:
        idle = 0 if sum(runner.step(0.02) for runner in runners) else idle + 1


def mean(said: str) -> float:
    """The mean reward that `millrace evaluate` printed."""
    (found,) = re.findall(r"mean[\w ]*\s+([\d.]+)", said)
    return float(found)


def test_a_small_model_learns_a_provider_s_work_from_captured_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    (port,) = free_ports(1)
    (told,) = [block.text for block in SHOWN if block.language == "toml"]
    (tmp_path / "millrace.toml").write_text(told.replace("9100", str(port)))
    for command in MAKERS:
        subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    settings, bus = load(tmp_path / "millrace.toml"), MemoryBus({})
    bus.ensure_topics(settings.layout.specs())
    announce(settings, bus)
    version_zero.create(settings, tmp_path / "model", bus)
    with running(PROVIDER.replace("9100", str(port))):
        asyncio.run(captured(settings, tmp_path, bus, WORK))
    sealed(settings, bus)
    there = list(History(bus, settings.namespace, "policy").rows(TRAJECTORIES))
    assert {(row["status"], row["tokens"]) for row in there} == {("completed", 0)}, "text, and nothing of it exact"

    for module, name in ((branch, "history"), (committed, "connect"), (evaluation, "connect_now"), (audit, "history")):
        monkeypatch.setattr(module, name, lambda settings: bus)
    said = {}
    for command in OURS:
        done = run(app, shlex.split(command)[1:])
        said[command] = done.output
        assert done.exit_code == 0, done.output
        print(done.output)
    made, before, after, _ = (said[command] for command in OURS)
    (shown,) = [block.text for block in SHOWN if block.language == "text"]
    assert [line for line in shown.splitlines() if line not in made] == [], made
    (*_, last) = History(bus, settings.namespace, "student").rows(WEIGHTS)
    assert (last["text_replies"], last["text_form"]) == (450, "template")
    assert mean(after) > mean(before) + 0.3, (before, after)
    for algorithm in ("awr", "grpo", "dpo"):
        done = run(app, ["replay", "branch", "other", "--algorithm", algorithm])
        assert (done.exit_code, "it has no exact tokens that can train (600)" in done.output) == (1, True), done.output
