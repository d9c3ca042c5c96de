"""Whether a deployment can work here: one answer a question, each with what to do about it.

Reads, and writes only what it removes again: one object in the shared storage, one topic."""

from __future__ import annotations

import json
import shlex
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from millrace.apps.answers import Answer, Word
from millrace.apps.check import check
from millrace.consumers.version_zero import unservable
from millrace.infra.config import Settings, is_local
from millrace.infra.engines.kinds import KINDS
from millrace.infra.errors import MillraceError, PolicyError
from millrace.infra.local_keys import kafka_options
from millrace.infra.machine.deployment import port_conflicts, ports
from millrace.infra.machine.java import java
from millrace.infra.machine.leftovers import deployment_id
from millrace.infra.machine.supervisor import Supervisor
from millrace.infra.process.net import LOCALHOST, is_listening

SKEW_S = 1.0
"""more than this between clocks and leases end early or late"""
FREE_GB = 5
WAIT_S = 10.0
PACKAGES = ("confluent-kafka", "torch", "transformers", *(name for kind in KINDS.values() for name in kind.packages))


def examine(settings: Settings, file: Path | None = None) -> Iterator[Answer]:
    """Every answer, in the order in which a newcomer should mend things. `file` is where the settings come from."""
    if file is not None and file.exists():
        yield _ask("settings file", lambda: _check_mode(file), "warning")
    yield _ask("home and keys", lambda: _check_modes(settings), "warning")
    yield _ask("packages", _packages)
    yield from check(settings)
    if settings.kafka.local:
        yield _ask("java", lambda: str(java()))
    if settings.engine.local:
        yield _runs_on(settings)
    yield _ask("disk", lambda: _disk(settings))
    yield _ask("shared storage", lambda: _storage(settings.objects))
    broker = _ask("broker", lambda: _broker(settings), "warning" if _needs_start(settings) else "bad")
    yield broker
    yield _ask("ports", lambda: _ports(settings))
    if broker.word == "ok":
        missing = _ask("topics", lambda: _topics_exist(settings), "warning")
        yield missing if missing.word == "warning" else _ask("topics", lambda: _topics(settings))
        yield _ask("clock against the broker", lambda: _clock(settings))
    yield from _open(settings)
    starts = "`millrace up`" if settings.engine.local else "start it on its machine"
    yield _ask("engine", lambda: _answers(settings.engine.url, starts), "warning")
    yield _ask("model", lambda: _model(settings))
    host = settings.gateway.host if settings.gateway.host != "0.0.0.0" else "127.0.0.1"
    yield _ask("gateway", lambda: _answers(f"http://{host}:{settings.gateway.port}", "`millrace up`"), "warning")


def _open(settings: Settings) -> Iterator[Answer]:
    """Warnings about what others on the way can read or do."""
    hosts = [server.strip().rpartition(":")[0] for server in settings.kafka.bootstrap.split(",")]
    protocol = str(settings.kafka.options.get("security.protocol", "PLAINTEXT")).upper()
    if not all(map(is_local, hosts)) and not protocol.endswith("SSL"):
        warning = (
            f"{settings.kafka.bootstrap} is beyond this machine and spoken with in clear ({protocol}): use SASL_SSL"
        )
        yield Answer("encryption", "warning", warning)
    engine = settings.engine.url
    if not settings.engine.key.get_secret_value() and not is_local(urlsplit(engine).hostname or ""):
        warning = (
            f"{engine} is beyond this machine and [engine] key is empty: whoever reaches it loads weights and samples"
        )
        yield Answer("engine key", "warning", warning)
    keys = {
        "[engine] key": (settings.engine.key, engine, "[engine] url"),
        "[gateway] upstream_key": (settings.gateway.upstream_key, settings.gateway.upstream_url, "upstream_url"),
    }
    for name, upstream in settings.gateway.upstreams.items():
        if upstream.key_env and _in_clear(upstream.url):
            warning = (
                f"{upstream.key_env} goes to {urlsplit(upstream.url).hostname} in clear: give url an https:// address"
            )
            yield Answer(f"[gateway.upstreams.{name}]", "warning", warning)
    for name, (key, url, where) in keys.items():
        if key.get_secret_value() and _in_clear(url):
            warning = f"{name} goes to {urlsplit(url).hostname} in clear: give {where} an https:// address"
            yield Answer(name, "warning", warning)
    collector = settings.telemetry.endpoint
    if settings.telemetry.exporter == "otlp" and settings.telemetry.headers and _in_clear(collector):
        host = urlsplit(collector).hostname
        warning = f"[telemetry] headers go to {host} in clear: give [telemetry] endpoint an https:// address"
        yield Answer("telemetry", "warning", warning)


def _in_clear(url: str) -> bool:
    """Whether others on the way to this address read what is sent there."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not is_local(parts.hostname or "")


def _check_mode(file: Path) -> str:
    """The file holds keys."""
    mode = file.stat().st_mode & 0o777
    if mode & 0o077:
        raise OSError(f"{file} may hold keys, and other users may read it (mode {mode:03o}): chmod 600 {file}")
    return f"{file} is yours alone"


def _check_modes(settings: Settings) -> str:
    """What holds keys, prompts and weights is open to its owner alone."""
    keys = settings.home / "keys"
    key_files = (settings.kafka.key_file, str(settings.kafka.options.get("ssl.key.location", "")))
    paths = [settings.home, keys, *sorted(keys.glob("*")), *map(Path, filter(None, key_files))]
    modes = {path: path.stat().st_mode & 0o777 for path in paths if path.exists()}
    if open_modes := {path: mode for path, mode in modes.items() if mode & 0o077}:
        text = ", ".join(f"{path} (mode {mode:03o})" for path, mode in open_modes.items())
        raise OSError(f"other users may get at {text}: chmod go= {shlex.join(map(str, open_modes))}")
    return f"{settings.home} is yours alone" if modes else f"{settings.home}: not made yet, `millrace up` closes it"


def _needs_start(settings: Settings) -> bool:
    """Whether the broker is one that `millrace up` starts, and has not yet."""
    port = settings.kafka.bootstrap.rpartition(":")[2]
    return settings.kafka.local and not is_listening(LOCALHOST, int(port))


def _ask(question: str, find: Callable[[], str], when_not: Word = "bad") -> Answer:
    try:
        return Answer(question, "ok", find())
    except (MillraceError, OSError, httpx.HTTPError) as error:
        return Answer(question, when_not, str(error) or type(error).__name__)


def _runs_on(settings: Settings) -> Answer:
    """What the local engine runs on."""
    kind, device = KINDS[settings.engine.kind], settings.engine.device
    question = f"{kind.name} runs on"
    if warning := kind.warning(device):
        return Answer(question, "warning", warning)
    return _ask(question, lambda: kind.runs_on(device))


def _model(settings: Settings) -> str:
    """Whether the engine of this machine can serve the newest version that lies here."""
    root = Path(settings.weights.removeprefix("file://"))
    configs = sorted(root.glob("v*-*/config.json"), key=lambda path: path.stat().st_mtime)
    if not configs:
        return "no version here yet"
    reason = unservable(settings, json.loads(configs[-1].read_bytes()))
    if reason is not None:
        raise PolicyError(f"{configs[-1].parent} {reason}")
    return str(configs[-1].parent)


def _packages() -> str:
    packages = []
    for name in PACKAGES:
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(packages)


def _disk(settings: Settings) -> str:
    place = next(path for path in (settings.home, *settings.home.parents) if path.exists())
    free_gb = shutil.disk_usage(place).free / 1e9
    if free_gb < FREE_GB:
        raise OSError(f"{free_gb:.1f} GB free at {place}: versions and logs need more, make room or move [home]")
    return f"{free_gb:.0f} GB free at {place}"


def _storage(uri: str) -> str:
    """Write, read, rename, remove: what learners, engines and gateways do there."""
    from millrace.infra.log.blobs import storage

    if "://" in uri.removeprefix("file://"):
        raise OSError(f"weights cannot lie at {uri}: mount it, and set [objects] to the directory")
    system, path = storage(uri)
    name, body = f"{path}/.doctor-{uuid.uuid4().hex}", uuid.uuid4().bytes
    system.makedirs(path, exist_ok=True)
    system.pipe_file(name, body)
    try:
        system.mv(name, f"{name}-renamed")
        name = f"{name}-renamed"
        if system.cat_file(name) != body:
            raise OSError(f"{uri} gave back other bytes than were written: do not use it")
    finally:
        system.rm_file(name)
    return f"{uri}: written, renamed, read, removed"


def _broker(settings: Settings) -> str:
    if _needs_start(settings):
        raise OSError(f"not started yet at {settings.kafka.bootstrap}: `millrace up` starts it")
    _, metadata = _admin(settings)
    return f"{len(metadata.brokers)} at {settings.kafka.bootstrap}, {len(metadata.topics)} topics"


def _ports(settings: Settings) -> str:
    """Whether `up` can have its ports, or has them already."""
    if Supervisor(settings.home, deployment_id(settings.namespace, settings.home)).running():
        return "in use by this deployment"
    conflicts = list(port_conflicts(settings))
    if conflicts:
        raise OSError("; ".join(conflicts))
    return ", ".join(f"{port} ({key})" for key, port in ports(settings).items()) + " are free"


def _topics_exist(settings: Settings) -> str:
    from millrace.infra.connect import connect

    names = [spec.name for spec in settings.layout.specs()]
    with connect(settings) as bus:
        missing = sorted({*names} - {*bus.topics(f"{settings.namespace}.")})
    if missing:
        raise OSError(
            f"{len(missing)} of {len(names)} of {settings.namespace} are not there yet, such as {missing[0]}: "
            "`millrace up` or `millrace topics` makes them"
        )
    return "all are there"


def _topics(settings: Settings) -> str:
    from millrace.infra.connect import connect

    specs = settings.layout.specs()
    with connect(settings) as bus:
        bus.check_topics(specs)
    return f"all {len(specs)} of {settings.namespace} are as the table says"


def _clock(settings: Settings) -> str:
    """The broker stamps a record on arrival; the stamp lies between our times of sending and of the answer."""
    import confluent_kafka.admin
    from confluent_kafka import KafkaException, Message, Producer

    kafka: Any = confluent_kafka.admin  # half of its names are hidden from type checkers
    (admin, _), name = _admin(settings), f"{settings.namespace}.doctor-{uuid.uuid4().hex[:8]}"
    stamps: list[int] = []

    def note(error: object, message: Message) -> None:
        if error is None:
            stamps.append(message.timestamp()[1])

    try:
        topic = kafka.NewTopic(name, 1, settings.kafka.replication, config={"message.timestamp.type": "LogAppendTime"})
        admin.create_topics([topic])[name].result(20)
        producer = Producer(
            {
                **kafka_options(settings),
                "bootstrap.servers": settings.kafka.bootstrap,
                "log_level": 0,
                "linger.ms": 0,
            }
        )
        before = after = 0.0
        for _ in range(2):  # the first meets a cold connection
            before = time.time()
            producer.produce(name, b"", on_delivery=note)
            producer.flush(20)
            after = time.time()
        admin.delete_topics([name])[name].result(20)
    except KafkaException as error:
        raise OSError(f"could not be measured: {error.args[0].str()}") from error
    if len(stamps) < 2:
        raise OSError("could not be measured: the broker did not answer")
    ahead, slack = stamps[-1] / 1000 - (before + after) / 2, (after - before) / 2
    skew = f"{abs(ahead):.3f} s {'behind' if ahead > 0 else 'ahead of'} the broker (+-{slack:.3f} s)"
    if abs(ahead) - slack > SKEW_S:
        raise OSError(f"{skew}: synchronise the clocks, leases are counted in log time")
    return skew


def _answers(base: str, starts: str) -> str:
    """Whether a service is healthy; `starts` is what to do where nothing listens."""
    url = f"{base}/health"
    try:
        status = httpx.get(url, timeout=3).status_code
    except httpx.ConnectError as error:
        raise OSError(f"nothing answers at {base}, not started yet: {starts}") from error
    if status != 200:
        raise OSError(f"{url} answers {status}")
    return f"{url} answers"


def _admin(settings: Settings) -> tuple[Any, Any]:
    """A client that got in, and what the cluster said first. Raises MillraceError with what to do."""
    from millrace.infra.log.kafka.entry import contact

    return contact(settings.kafka.bootstrap, kafka_options(settings), WAIT_S)
