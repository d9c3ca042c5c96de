"""The reloader as a process on a real broker, killed with SIGKILL at every point of a swap on every kind of engine,
however the weights come; so is the learner that sends them. vLLM and SGLang meet every point where
`MILLRACE_ENGINES=all` (`make engines`), else one of each beginning: every reload of theirs costs what a start does.

Requests never stop meanwhile: that each of their tokens has the log-probability of the version that its label names
says that nothing was sampled from other weights. Requests under way are kept in one swap, and ended in the next."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from millrace.consumers.learner.version.sender import WeightSender
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.kinds import open_engine
from millrace.infra.log.base import TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.process.net import LOCALHOST, wait_until
from millrace.schemas.records import WeightVersion
from millrace.trainers.weights import delta_files
from tests.consumers.reloader.crowd import Crowd, check_versions
from tests.consumers.reloader.reloading import Served, spawn
from tests.support.announced import POLICY, announce, statuses, weight_event
from tests.support.engines import EVERY_POINT, until
from tests.support.fault_points import fault_points
from tests.support.forked import Fork
from tests.support.learners import ROOT
from tests.support.tiny_model import write_manifest

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(900)]
POINTS = [
    (way, point)
    for way, beginnings in {
        "directory": ("reloader.",),
        "delta": ("reload.",),
        "broadcast": ("transfer.", "sender.joining", "sender.between_pieces", "sender.after_last"),
    }.items()
    for point in fault_points("consumers", "infra")
    if point.startswith(beginnings)
]
FEW = ("reloader.after_load", "reload.after_rename", "sender.between_pieces", "transfer.after_update")
PROMPT = [22, 10, 14, 40]
LENGTH = 400
EXACT = 2e-5
SENDER = """
import sys, time
from pathlib import Path
from millrace.consumers.learner.version.sender import WeightSender
one = WeightSender("127.0.0.1", 120)
one.hold({version}, "{digest}", Path("{path}"))
print(one.url, flush=True)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def near(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three directories that differ in the output matrix alone, and there in every token's row."""
    root = tmp_path_factory.mktemp("near")
    for turn in range(3):
        folder = Path(shutil.copytree(folders[0], root / f"m{turn}"))
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights["lm_head.weight"].roll(turn, 0)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        write_manifest(folder)
    return [root / f"m{turn}" for turn in range(3)]


def made(way: str, version: int, folders: list[Path], url: str) -> WeightVersion:
    """The event of a version that comes in this way."""
    folder = folders[version % len(folders)]
    event = weight_event(version, folder)
    if way == "delta":
        written = delta_files.write(folders[(version - 1) % len(folders)], folder)
        assert written is not None
        event |= {"mode": "delta", "delta": str(written.path), "delta_hash": written.digest}  # type: ignore[typeddict-item]
        event |= {"delta_bytes": written.size, "full_bytes": written.full}  # type: ignore[typeddict-item]
    elif way == "broadcast":
        event["broadcast"] = url
    return event


async def test_killed_at_every_point_the_next_start_finishes(
    broker: str, served: Served, near: list[Path], tmp_path: Path
) -> None:
    points = POINTS if EVERY_POINT or served.kind == "inprocess" else [one for one in POINTS if one[1] in FEW]
    namespace, armed, log = f"killed-{served.kind}", tmp_path / "armed", tmp_path / "log"
    weights, workers = f"{namespace}.{POLICY}.weights", f"{namespace}.workers"
    armed.mkdir()

    def run(version: int) -> Fork:
        settings = {
            "ENGINE__KIND": served.kind,
            "ENGINE__WEIGHTS": "broadcast",
            "ENGINE__CACHE": str(tmp_path / "cache"),
            "ENGINE__INTERRUPT": ("keep", "abort")[version % 2],
        }
        return spawn(broker, namespace, POLICY, served.url, log, KILL_DIR=str(armed), **settings)

    def send(version: int, digest: str, point: str) -> tuple[Fork, str]:
        """A learner's end that dies at this point, and its address."""
        address = tmp_path / f"sender-{version}"
        source = SENDER.format(version=version, digest=digest, path=near[version % 3] / "model.safetensors")
        process = Fork(source, {**os.environ, "PYTHONPATH": str(ROOT), "MILLRACE_KILL": point}, ROOT, address)
        wait_until(lambda: "\n" in address.read_text(), "the sender", 120)
        return process, address.read_text().strip()

    engine = open_engine(served.kind, served.url, resubmits=True)
    with KafkaBus(broker) as bus, closing(WeightSender(LOCALHOST, timeout_s=120)) as sender:
        bus.ensure_topics([TopicSpec(weights, 1), TopicSpec(workers, 1, {"cleanup.policy": "compact"})])
        announce(bus, weight_event(0, near[0]), weights)
        reloader, begin = run(0), 0

        def loaded(version: int) -> bool:
            states = [(one["state"], one["version"]) for one in statuses(bus, workers)[begin:] if one is not None]
            return ("loaded", version) in states

        async def serves(version: int) -> bool:
            state = await served.control.state()
            return state.label == f"{POLICY}@{version}" and not state.paused and loaded(version)

        try:
            await until(lambda: serves(0))
            async with Crowd(engine, PROMPT, Sampling(LENGTH, ignore_eos=True), size=2) as crowd:
                for version, (way, point) in enumerate(points, 1):
                    event = made(way, version, near, sender.url)
                    sender.hold(version, event["digest"], near[version % 3] / "model.safetensors")
                    doomed = reloader
                    if point.startswith("sender."):
                        doomed, event["broadcast"] = send(version, event["digest"], point)
                    else:
                        (armed / point).touch()
                    announce(bus, event, weights)
                    await until(lambda doomed=doomed: doomed.poll() is not None)
                    assert doomed.poll() == -9, point
                    if doomed is reloader:
                        begin = len(statuses(bus, workers))
                        reloader = run(version)
                    await until(lambda version=version: serves(version))
        finally:
            reloader.terminate()
            assert reloader.wait(120) == 0
    await engine.close()
    met = {span.label for reply in crowd.swapped for span in reply.spans[1:]}
    assert len(met) > len(points) // 2, "requests were under way in most swaps"
    for reply in crowd.replies:
        assert (len(reply.token_ids), reply.finish_reason) == (LENGTH, "length")
        check_versions(reply, PROMPT, near, EXACT)
