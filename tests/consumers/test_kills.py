"""A process that dies at any point of a version's way into an engine, by SIGKILL, on a real broker with real processes.

The learner, the engine and its reloader run; each point of the code is armed once, and whoever passes it dies there and
is started again. At the end the versions are those of a run without a kill, byte for byte."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest

from millrace.consumers import policy_names
from millrace.consumers.audit import audit
from millrace.consumers.reloader.serve import cache_of
from millrace.infra.config import Settings, variables
from millrace.infra.engines.control import EngineState
from millrace.infra.engines.kinds import KINDS
from millrace.infra.errors import EngineUnavailable
from millrace.infra.local_keys import ENGINE, engine_key, make_keys
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.schemas import codec
from millrace.schemas.labels import parse_label
from tests.chaos.ways import points_of
from tests.support.engines import differences
from tests.support.feed import feed, settings_for, start_policy
from tests.support.forked import Fork
from tests.support.learners import ROOT, Place, entries

ROLES = {"learner": "learn", "engine": "engine", "reloader": "reload"}
PROGRAM = """
import sys
sys.argv = ["millrace", "{command}"]
from millrace.apps.cli.main import app
app(prog_name="millrace")
"""
PATIENCE_S = 480.0
PROMPT = [1, 22, 3, 4, 5]
EXACT = 2e-5
FLAGS = {
    "engine.kind": "inprocess",
    "learner.keep": 99,
    "learner.lr": 1e-2,
    "learner.warmup": 0,
}
"""steps large enough to tell versions apart by the tokens' log-probabilities, and all versions kept for that"""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the engine sampled for one request."""

    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]


class Ends:
    """`flags`: settings besides FLAGS. Version 0 exists; nothing runs before `start`."""

    def __init__(self, folder: Path, bootstrap: str, namespace: str, **flags: Any) -> None:
        url = f"http://{LOCALHOST}:{free_ports(1)[0]}"
        chosen = {**FLAGS, "engine.url": url, **flags}
        self.settings: Settings
        self.settings, file = settings_for(folder, bootstrap, namespace, **chosen)
        self.bus = KafkaBus(bootstrap)
        start_policy(self.settings, self.bus, folder)
        make_keys(self.settings, ENGINE)  # as `up` does: a reloader that is there before the engine needs it too
        self.armed = folder / "armed"
        self.armed.mkdir()
        self.deaths: list[str] = []
        """roles that died, in order"""
        self.fed = 0
        """batches that are ready"""
        self.replies: list[Reply] = []
        self._folder = folder
        self._environment = {
            **os.environ,
            **variables(chosen),
            "MILLRACE_CONFIG": str(file),
            "MILLRACE_KILL_DIR": str(self.armed),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.processes: dict[str, Fork] = {}
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read)

    # ---- processes

    def start(self, *roles: str) -> None:
        """Start these roles."""
        for role in roles:
            program = PROGRAM.format(command=ROLES[role])
            self.processes[role] = Fork(program, self._environment, ROOT, self._log(role))

    def change(self, **flags: Any) -> None:
        """Settings of what is started from now on."""
        self._environment |= variables(flags)

    def kill(self, role: str) -> None:
        """kill -9, and wait until it is gone. It is started again by whoever waits next."""
        self.processes[role].kill()
        self.processes[role].wait()

    def pump(self, *, leave: str = "") -> None:
        """Start again what has died, but for the role `leave`. Only kill -9 may have ended it."""
        for role, process in list(self.processes.items()):
            if (code := process.poll()) is not None and role != leave:
                assert code == -signal.SIGKILL, f"{role} ended by itself\n{self.everything()}"
                self.deaths.append(role)
                self.start(role)

    def until(self, what: Callable[[], bool], *, leave: str = "") -> None:
        """Keep everything running until `what`."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            self.pump(leave=leave)
            assert time.monotonic() < deadline, f"not in {PATIENCE_S:.0f} s\n{self.everything()}"
            time.sleep(0.05)
        self.pump(leave=leave)

    def listen(self) -> None:
        """Begin to ask for tokens."""
        self._reader.start()

    def everything(self) -> str:
        """All outputs, for a failed assertion."""
        return "\n".join(f"--- {role}\n{self.output(role)[-3000:]}" for role in ROLES)

    def output(self, role: str) -> str:
        """What all processes of a role have written."""
        path = self._log(role)
        return path.read_text(errors="replace") if path.exists() else ""

    def _log(self, role: str) -> Path:
        return self._folder / f"{role}.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for process in self.processes.values():
            process.kill()
            process.wait()
        if self._reader.ident is not None:
            self._reader.join()
        self.bus.close()

    # ---- versions

    def feed(self) -> None:
        """Make the next batch ready."""
        feed(self.bus, self.settings, range(4 * self.fed, 4 * (self.fed + 1)))
        self.fed += 1

    def committed(self) -> int:
        """The newest version."""
        return len(entries(self.bus, self.settings)) - 1

    def step(self, *, leave: str = "") -> None:
        """Feed a batch, and wait until the engine serves the version that it makes."""
        self.feed()
        self.until(lambda: self.serves(self.fed), leave=leave)

    @property
    def bearer(self) -> dict[str, str]:
        """What the local engine asks for."""
        return {"authorization": f"Bearer {engine_key(self.settings)}"}

    def serves(self, version: int) -> bool:
        """Whether the engine says that it samples from `version`."""
        try:
            state = asyncio.run(self._look())
        except EngineUnavailable:
            return False
        return parse_label(state.label) == (self.settings.policy.name, version) and not state.paused

    async def _look(self) -> EngineState:
        engine = self.settings.engine
        control = KINDS[engine.kind].control(engine.url, engine_key(self.settings))
        try:
            return await control.state()
        finally:
            await control.close()

    def die_at(self, point: str) -> str:
        """Let the first process that passes `point` on the way of a new version into the engine be killed there; once
        the engine serves that version, gives the role that died."""
        before = len(self.deaths)
        (self.armed / point).touch()
        self.feed()
        self.until(lambda: len(self.deaths) > before and self.serves(self.fed))
        (died,) = self.deaths[before:]
        return died

    def events(self) -> dict[int, Mapping[str, Any]]:
        """The weight events by version."""
        records = self.bus.read(policy_names.topics(self.settings)["weights"], 0)
        found = [codec.decode_as("WeightVersion", record.value or b"") for record in records]
        return {event["version"]: event for event in found}

    # ---- what must hold

    def check(self) -> None:
        """Versions are dense, chained and whole on disk; every token that anybody saw is of the version it names."""
        report = audit(self.bus, self.settings.namespace, self.settings.policy.name, files=True)
        for name in ("versions", "tiles", "ledger-chain", "files"):
            assert report.finding(name).holds, report.finding(name)
        folders = {f"{self.settings.policy.name}@{v}": Path(e["uri"]) for v, e in self.events().items()}
        (last,) = [self.ask()]
        assert [label for label, _, _ in last.spans] == [f"{self.settings.policy.name}@{self.fed}"]
        for reply in [*self.replies, last]:
            assert reply.spans[-1][2] == len(reply.tokens)
            for label, begin, end in reply.spans:
                found = differences(folders[label], PROMPT, reply.tokens, reply.logprobs)[begin:end]
                assert max(found, default=0.0) < EXACT, f"tokens {begin} to {end} are not of {label}"
        former = folders[f"{self.settings.policy.name}@{self.fed - 1}"]
        assert max(differences(former, PROMPT, last.tokens, last.logprobs)) > 10 * EXACT, "versions can be told apart"

    def ask(self) -> Reply:
        """Sample 60 tokens."""
        sampling = {"max_tokens": 60, "ignore_eos": True, "logprobs": 0}
        url = f"{self.settings.engine.url}/inference/v1/generate"
        asked = {"token_ids": PROMPT, "sampling_params": sampling}
        answer = httpx.post(url, json=asked, headers=self.bearer, timeout=PATIENCE_S)
        (choice,) = answer.raise_for_status().json()["choices"]
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
        return Reply(choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]], spans)

    def _read(self) -> None:
        while not self._over.is_set():
            try:
                reply = self.ask()
            except httpx.HTTPError:
                self._over.wait(0.1)
                continue
            if all(parse_label(label) for label, _, _ in reply.spans):  # an engine that has just started serves nobody
                self.replies.append(reply)
            self._over.wait(0.1)


pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(1800)]
Deploy = Callable[..., Ends]
WHO = {"delta": "learner", "sender": "learner", "reload": "reloader", "transfer": "reloader", "receiver": "engine"}
"""first word of a point -> the process that passes it"""


@pytest.fixture
def deploy(tmp_path: Path, broker: str) -> Iterator[Deploy]:
    made: list[Ends] = []

    def make(**flags: Any) -> Ends:
        made.append(Ends(tmp_path / f"ends-{len(made)}", broker, f"t{uuid.uuid4().hex[:8]}", **flags))
        made[-1].start("learner", "engine", "reloader")
        return made[-1]

    yield make
    for one in made:
        with one:
            pass


def undisturbed(folder: Path, versions: int, **flags: Any) -> list[str]:
    """Digests of the versions that one learner makes of the same groups in this thread, never killed."""
    whole = Place(folder, **{**FLAGS, **flags})
    feed(whole.bus, whole.settings, range(4 * versions))
    whole.learn(versions)
    found = [row["digest"] for row in entries(whole.bus, whole.settings)]
    whole.bus.close()
    return found


def finish(it: Ends, folder: Path, **flags: Any) -> None:
    """What must hold at the end of every history."""
    it.step()
    it.check()
    rows = entries(it.bus, it.settings)
    assert [row["digest"] for row in rows] == undisturbed(folder, it.fed, **flags)
    assert "truncated or changed" not in it.everything()


def test_deltas(deploy: Deploy, tmp_path: Path) -> None:
    flags = {"learner.anchor_every": 100, "engine.interrupt": "abort"}
    it = deploy(**flags)
    it.listen()
    it.step()
    for point in points_of("deltas"):
        assert it.die_at(point) == WHO[point.partition(".")[0]]
    finish(it, tmp_path / "whole", **flags)
    assert {event["mode"] for event in it.events().values()} == {"full", "delta"}
    cache = cache_of(it.settings, it.settings.engine.url)
    assert cache is not None
    assert sorted(path.name.partition("-")[0] for path in cache.iterdir()) == [f"v{it.fed - 1}", f"v{it.fed}"]

    root = policy_names.weights_root(it.settings)
    assert list(root.glob("deltas/.tmp-*")), "one was killed over its draft"
    it.change(**{"learner.keep": 1})
    it.kill("learner")
    it.step()
    it.until(lambda: not [*root.glob(".tmp-*"), *root.glob("deltas/.tmp-*")])
    assert it.serves(it.fed)


def test_broadcasts(deploy: Deploy, tmp_path: Path) -> None:
    flags = {"engine.weights": "broadcast"}
    it = deploy(**flags)
    it.listen()
    it.step()
    for point in points_of("broadcast"):
        assert it.die_at(point) == WHO[point.partition(".")[0]]
    (it.armed / "receiver.between_pieces").touch()
    it.feed()
    it.until(lambda: it.processes["engine"].poll() is not None and it.committed() == it.fed, leave="engine")
    it.feed()
    it.until(lambda: it.committed() == it.fed, leave="engine")  # training goes on without an engine
    finish(it, tmp_path / "whole", **flags)
