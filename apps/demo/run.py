"""Runs the demo: warm start, deployment, faults on schedule, live view, audit, report.

Invariants: everything it shows is read from topics; the deployment is stopped whatever happens; the exit code is 0 only
when the audit is clean and the plan's versions and gain were reached.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import tomlkit
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from millrace.apps.demo.fleet import BROKER, DemoFleet
from millrace.apps.demo.plan import FULL_DEMO, NAMESPACE, SHORT_DEMO, DemoPlan, PlannedFault, flags, gain
from millrace.consumers.tell.status import StatusWatch, duration, learning, processes
from millrace.infra import durable
from millrace.infra.config import FILE, PREFIX, Settings, load
from millrace.infra.connect import connect
from millrace.infra.errors import ConfigError, ServiceError
from millrace.infra.machine import leftovers
from millrace.infra.machine.leftovers import deployment_id
from millrace.infra.machine.supervisor import ProgramState, Supervisor
from millrace.infra.process.net import free_ports, is_listening, wait_until
from millrace.infra.terminal import Terminal
from millrace.schemas.records import LedgerEntry

STALL_S = 240
"""Seconds without a new version after which the demo gives up."""
TASKS = 20_000


def run(
    home: Path, *, seed: int = 0, is_short: bool = False, kind: str | None = None, console: Console | None = None
) -> int:
    """The whole demo in `home`, on an engine of a `kind`. A former demo there is stopped and removed first; ConfigError
    for a directory that holds anything else. Returns the exit code."""
    console = console or Terminal()
    plan = SHORT_DEMO if is_short else FULL_DEMO
    make_empty(home)
    settings, file = _configure(home, seed, kind)
    fleet = DemoFleet(settings, file)
    start = time.monotonic()
    try:
        with DemoScreen(console, plan.versions) as screen:
            screen.tell("starting Kafka; warming up a 228k-parameter Qwen2 by SFT on 'sort six digits'")
            _prepare(settings, fleet, seed, screen)
            watch = StatusWatch(connect(settings), settings.namespace, settings.policy.name)
            usage = CpuUsage(fleet.deployment)
            screen.tell("starting engine, gateway, stages, learners, reloader and rollout workers")
            fleet.up()
            is_complete = _drive(settings, plan, fleet, watch, usage, screen, start)
            screen.tell("stopping the fleet; Kafka stays for the audit")
            fleet.up((BROKER,))
        code = _finish(settings, plan, watch, usage, console, is_complete, time.monotonic() - start)
        watch.close()
        return code
    finally:
        fleet.down()


def make_topics(settings: Settings) -> None:
    """Wait for the broker, then make what is missing."""
    host, _, port = settings.kafka.bootstrap.rpartition(":")
    wait_until(lambda: is_listening(host, int(port)), "Kafka", 180)
    with connect(settings) as bus:
        bus.ensure_topics(settings.layout.specs())


def make_empty(home: Path) -> None:
    """Make `home` an empty directory, if it is one or holds a former demo, which is stopped. Raises ConfigError."""
    if home.exists() and any(home.iterdir()):
        try:
            former = tomllib.loads((home / FILE).read_text())
        except (OSError, ValueError):
            former = {}
        if (former.get("namespace"), former.get("home")) != (NAMESPACE, str(home.absolute())):
            raise ConfigError(f"{home} holds files that no demo wrote: give --home a directory of its own")
        Supervisor(home, deployment_id(NAMESPACE, home)).down()
        shutil.rmtree(home)
    home.mkdir(parents=True, exist_ok=True)


def _configure(home: Path, seed: int, kind: str | None) -> tuple[Settings, Path]:
    # In the environment, which every program inherits, it would lead to another home than the file's.
    os.environ.pop(f"{PREFIX}HOME", None)
    values = flags(home.absolute(), seed, free_ports(4), kind)
    document = tomlkit.document()
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        if section and section not in document:
            document[section] = tomlkit.table()
        (document[section] if section else document)[key] = value
    file = home / FILE
    durable.write(file, tomlkit.dumps(document))
    return load(file), file


def _prepare(settings: Settings, fleet: DemoFleet, seed: int, screen: DemoScreen) -> None:
    """Kafka up, the model warm, version 0 written. Torch stays in a child process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        warming = child.submit(warm_start, settings.home, seed)
        fleet.up((BROKER,))
        make_topics(settings)
        steps, accuracy, seconds = warming.result()
        screen.tell(f"warm start: {steps} SFT steps in {seconds:.0f} s, sampled accuracy {accuracy:.2f}")
        child.submit(create_policy, settings).result()
    screen.tell("version 0 is in the log")


def _drive(
    settings: Settings,
    plan: DemoPlan,
    fleet: DemoFleet,
    watch: StatusWatch,
    usage: CpuUsage,
    screen: DemoScreen,
    start: float,
) -> bool:
    """Until the plan's versions are there: watch, and let processes die and join on schedule."""
    todo = list(plan.faults)
    recoveries: list[Callable[[], bool]] = []
    progress = time.monotonic()
    sample_time = draw_time = 0.0
    failing: set[str] = set()
    while True:
        now = time.monotonic()
        if watch.poll(0.2):
            progress = time.monotonic()
            screen.version(watch.versions[-1], watch.rate("samples"))
        if now - sample_time > 2:
            usage.sample()
            sample_time = now
            failing = _name_failing(fleet, failing, screen)
        if now - draw_time > 0.5:
            screen.show(watch, fleet.states)
            draw_time = now
        while todo and todo[0].is_due(watch.version, watch.lag, settings.policy.batch):
            recoveries.append(_strike(todo.pop(0), fleet, watch, screen))
        recoveries = [is_over for is_over in recoveries if not is_over()]
        if watch.version >= plan.versions and not todo and not recoveries:
            return True
        if now - progress > STALL_S or now - start > plan.minutes * 60:
            screen.tell(f"gave up at version {watch.version}: see the logs in {fleet.logs}")
            return False


def _name_failing(fleet: DemoFleet, former: set[str], screen: DemoScreen) -> set[str]:
    """Tell of each program that keeps ending, once, with its last words; gives the names of all of these."""
    failing = {state.name: state.said for state in fleet.states() if state.failing}
    for name in failing.keys() - former:
        screen.tell(f"{name} keeps ending: {failing[name]} (its log: {fleet.logs / name}.log)")
    return set(failing)


def _strike(fault: PlannedFault, fleet: DemoFleet, watch: StatusWatch, screen: DemoScreen) -> Callable[[], bool]:
    """Do it; returns what tells, once, that its consequence is over."""
    at = time.monotonic()
    version, resolutions = watch.version, sum(watch.resolved.values())
    if fault.kind == "join":
        before = len(watch.versions[-1]["ranks"])
        fleet.add(fault.name, like="learn-0")
        screen.tell(f"v{version}: started {fault.name}")

        def has_joined() -> bool:
            if not watch.versions or len(watch.versions[-1]["ranks"]) <= before:
                return False
            share = watch.versions[-1]["ranks"][-1]["samples"]
            screen.tell(f"{fault.name} trains since v{watch.version} ({share} samples), {_since(at)} after its start")
            return True

        return has_joined
    pid = fleet.pid(fault.name)
    if pid is None:
        raise ServiceError(f"{fault.name} does not run, so the demo cannot kill it: see {fleet.logs}")
    os.kill(pid, signal.SIGKILL)
    screen.tell(f"v{version}: kill -9 {fault.name} (pid {pid})")

    def has_recovered() -> bool:
        if fault.learner:
            if watch.version <= version:
                return False
            after = next(entry for entry in watch.versions if entry["version"] > version)
            screen.tell(
                f"recovered from the death of pid {pid}: v{after['version']} committed {_since(at)} after the kill, "
                f"of which {waiting_s(after):.1f} s were spent waiting for groups"
            )
            return True
        new_pid = fleet.pid(fault.name)
        if new_pid in (None, pid) or sum(watch.resolved.values()) <= resolutions or watch.last_resolution < at + 0.5:
            return False
        screen.tell(f"{fault.name} is back as pid {new_pid}: it resolved the next group {_since(at)} after the kill")
        return True

    return has_recovered


def waiting_s(entry: LedgerEntry) -> float:
    """Seconds that the learners looked for groups that were not ready, since the version before or since they formed
    anew."""
    return sum(entry["metrics"].get(f"timings_{phase}", 0.0) for phase in ("wait", "boundary"))


def _since(at: float) -> str:
    return f"{time.monotonic() - at:.1f} s"


def summary(settings: Settings, watch: StatusWatch, seconds: float, page: Path) -> list[str]:
    """What happened, and where to go from here. `seconds` are those of the whole run, its start included; the rate is
    that of the page: the samples behind the first version over the time that they took."""
    samples = sum(entry["metrics"].get("samples", 0.0) for entry in watch.versions)
    lines = [
        f"The model trained through {watch.version} versions on {samples:.0f} samples in {duration(seconds)}, start-up "
        f"included; from the first version on {watch.rate('samples', len(watch.versions)):.0f} samples/s."
    ]
    if len(watch.rewards) >= 20:
        first, last = sum(watch.rewards[:10]) / 10, sum(watch.rewards[-10:]) / 10
        lines.append(f"Its mean reward rose from {first:.3f} (first ten versions) to {last:.3f} (last ten).")
    return [
        *lines,
        f"Look at {page}: the reward curve, who trained what, what became of every group.",
        f"Go on with it: cd {settings.home} && millrace up, then millrace status --watch.",
        "Train your own agent: docs/tutorial.md.",
    ]


def _finish(
    settings: Settings,
    plan: DemoPlan,
    watch: StatusWatch,
    usage: CpuUsage,
    console: Console,
    is_complete: bool,
    seconds: float,
) -> int:
    from millrace.consumers.audit.command import render
    from millrace.consumers.tell.command import report

    page = settings.home / "report.html"
    cpu = usage.by_role()
    audit = report(settings, page, files=True)
    console.print(render(audit, console.width))
    rewards = watch.rewards
    rise = gain(rewards)
    (settings.home / "cpu.json").write_text(json.dumps({"seconds": cpu, "memory": usage.memory()}, indent=1))
    if console.is_terminal:
        console.rule("demo")
    for line in summary(settings, watch, seconds, page):
        console.print(line, highlight=False, soft_wrap=True)
    enough = plan.gain is None or rise >= plan.gain
    if not enough:
        console.print(f"[red]the gain {rise:+.3f} is below {plan.gain:+.2f}[/red]")
    return 0 if is_complete and audit.clean and enough else 1


class CpuUsage:
    """Adds up user and system seconds by role. Call `sample` every second or two: what a process used between the last
    sample and its death is lost."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._roles: dict[tuple[int, float], str] = {}
        self._seconds: dict[tuple[int, float], float] = {}
        self._memory: dict[str, int] = {}

    def sample(self) -> None:
        """Read every live process of the deployment."""
        memory: dict[str, int] = {}
        for process, now in leftovers.members(self._deployment).items():
            try:
                with process.oneshot():
                    key = (process.pid, process.create_time())
                    # Between fork and exec a program still looks like its supervisor.
                    former = self._roles.get(key, leftovers.SUPERVISOR)
                    role = now if former == leftovers.SUPERVISOR else former
                    times = process.cpu_times()
                    memory[role] = memory.get(role, 0) + process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            self._roles[key] = role
            self._seconds[key] = times.user + times.system
        self._memory = memory

    def by_role(self) -> dict[str, float]:
        """CPU seconds so far by role, most first."""
        total: dict[str, float] = {}
        for key, seconds in self._seconds.items():
            total[self._roles[key]] = total.get(self._roles[key], 0.0) + seconds
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def memory(self) -> dict[str, int]:
        """Resident bytes by role at the last sample."""
        return dict(self._memory)


def version_line(entry: LedgerEntry, rate: float) -> str:
    """One version in words. `rate` in samples a second."""
    metrics = entry["metrics"]
    shares = "+".join(str(share["samples"]) for share in entry["ranks"])
    return (
        f"v{entry['version']:<3} reward {metrics.get('reward_mean', 0.0):.3f}  "
        f"staleness {metrics.get('staleness_mean', 0.0):.2f} (max {metrics.get('staleness_max', 0.0):.0f})  "
        f"learners {len(entry['ranks'])} ({shares} samples)  {rate:.0f} samples/s"
    )


class DemoScreen:
    """Draws the watch, the programs and the story so far."""

    def __init__(self, console: Console, target: int) -> None:
        self._console = console
        self._target = target
        self._story: list[str] = []
        self._started = time.monotonic()
        self._live = Live(console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> DemoScreen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def tell(self, text: str) -> None:
        """Something happened: stays on the screen, with its time."""
        text = f"{time.monotonic() - self._started:5.0f} s  {text}"
        self._story.append(text)
        if not self._live:
            self._console.print(text, highlight=False, soft_wrap=True)

    def version(self, entry: LedgerEntry, rate: float) -> None:
        """A new version was committed."""
        if not self._live:
            self._console.print(f"        {version_line(entry, rate)}", highlight=False, soft_wrap=True)

    def show(self, watch: StatusWatch, programs: Callable[[], Sequence[ProgramState]]) -> None:
        """Redraw; `programs` is asked only when somebody looks."""
        if self._live:
            self._live.update(self._draw(watch, programs()))

    def _draw(self, watch: StatusWatch, programs: Sequence[ProgramState]) -> RenderableType:
        story = Text("\n".join(self._story[-10:]))
        return Group(
            Panel(learning(watch, self._target), title="learning"),
            Panel(processes(programs), title="processes"),
            Panel(story, title="story"),
        )


def warm_start(home: Path, seed: int, target: float = 0.2) -> tuple[int, float, float]:
    """Writes `home/model`, warm once `target` of sampled replies are right, and `home/tasks.jsonl`.

    Returns SFT steps, sampled accuracy and seconds."""
    import torch

    from millrace.apps.demo import sort_digits
    from millrace.apps.demo.tiny import make_sort_policy

    torch.set_num_threads(1)  # a second thread only helps on idle cores, and here the broker starts beside it
    sort_digits.write_tasks(home / "tasks.jsonl", TASKS, seed)
    warm = make_sort_policy(home / "model", seed, target=target)
    return warm.steps, warm.accuracy, warm.seconds


def create_policy(settings: Settings) -> None:
    """Writes version 0 of the policy from `home/model`."""
    from millrace.consumers import version_zero

    with connect(settings) as bus:
        version_zero.create(settings, settings.home / "model", bus)
