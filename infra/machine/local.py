"""The roles `broker` and `engine`: this process becomes the service, so that its process id is the service's own."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from millrace.infra.config import Settings, is_local
from millrace.infra.connect import connect
from millrace.infra.engines.kind import AdapterRoom, LocalEngine
from millrace.infra.engines.kinds import KINDS
from millrace.infra.errors import ConfigError, TopicError, UnreachableError
from millrace.infra.local_keys import BROKER, ENGINE, broker_key, engine_key, make_keys
from millrace.infra.log.newest import newest_first
from millrace.infra.log.readable import readable
from millrace.infra.log.topics import full_name
from millrace.infra.machine.broker import Broker
from millrace.infra.process.service import inherited_environment
from millrace.infra.versions import directory
from millrace.schemas.records import WeightVersion

log = logging.getLogger(__name__)


def broker(settings: Settings) -> Broker:
    """The local broker that the settings describe."""
    port = int(settings.kafka.bootstrap.rpartition(":")[2])
    return Broker(
        settings.home / "broker", port, settings.kafka.heap_mb, broker_key(settings), sync=settings.kafka.sync
    )


def run_broker(settings: Settings) -> None:
    """Become the broker; never returns."""
    make_keys(settings, BROKER)
    service = broker(settings)
    service.prepare()
    _become(service.command(), service.environment())


def run_engine(settings: Settings) -> None:
    """Become the engine, on the newest version of the policy, once there is one; never returns. Raises ConfigError for
    one that would listen beyond this machine without a key."""
    make_keys(settings, ENGINE)
    engine = settings.engine
    if not engine.key.get_secret_value() and not is_local(urlsplit(engine.url).hostname or ""):
        raise ConfigError(f"[engine] url {engine.url} is reachable from other machines: set [engine] key")
    local = LocalEngine(
        settings.home / "engine",
        engine.url,
        _newest(settings),
        settings.policy.name,
        device=engine.device,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        kv_cache_mb=engine.kv_cache_mb,
        args=engine.args,
        key=engine_key(settings),
        broadcasts=engine.weights == "broadcast",
        adapters=adapter_room(settings),
    )
    _become(*KINDS[engine.kind].launch(local))


def adapter_room(settings: Settings) -> AdapterRoom | None:
    """Room for the adapters that requests may need and the one that is being loaded; None where versions are whole."""
    return AdapterRoom(settings.learner.lora.rank, settings.policy.eta + 3) if settings.adapters else None


def _newest(settings: Settings) -> str:
    """Directory of the newest full weights that still lie there. The reloader checks and corrects it later."""
    last = ""
    while True:
        try:
            with connect(settings) as bus:
                for record in newest_first(bus, full_name(settings.namespace, f"{settings.policy.name}.weights")):
                    event = readable(WeightVersion, record)
                    path = directory(event, settings.weights) if event else Path()
                    if event and event["mode"] != "adapter" and (path / "config.json").is_file():
                        return str(path)
            reason = f"policy {settings.policy.name} has no version yet: `millrace policy create --model DIR` writes it"
        except (UnreachableError, TopicError) as error:
            reason = str(error)
        if reason != last:
            log.info("the engine waits: %s", reason)
            last = reason
        time.sleep(0.5)


def _become(command: Sequence[str], environment: dict[str, str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), inherited_environment() | environment)
