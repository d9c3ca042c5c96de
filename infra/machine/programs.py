"""Which processes a deployment consists of: the settings as a list of programs for the supervisor.

Each runs one command of the command line, so that the same role runs alone on another machine by the same words.
Invariants: a program differs from what it was exactly when something changed that it reads; the supervisor restarts
what differs. No secret stands in a program, nor can it be found from one by trying words in bulk.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from functools import lru_cache

from pydantic import SecretStr

from millrace.infra.config import Settings
from millrace.infra.gateway_processes import INDEX, retired_indexes
from millrace.infra.machine.supervisor import Program
from millrace.schemas.ids import now_micros

BROKER, ENGINE = "broker", "engine"
SHARED_ROLES = ("refine", "seal", "warehouse")
"""roles that serve every policy of a namespace"""
KEYS = 1
"""raised when programs began to ask each other for keys: those that run without are restarted"""
EVERY = ("namespace", "home", "objects", "kafka", "telemetry")
"""settings that every role reads"""
READS: Mapping[str, tuple[str, ...]] = {
    "broker": ("home", "kafka"),
    "engine": ("namespace", "home", "objects", "kafka", "policy.name", "engine"),
    "reload": (*EVERY, "policy.name", "policy.eta", "engine"),
    "gateway": (
        *EVERY,
        *(
            "topics",
            "gateway",
            "rollout.key",
            "engine.kind",
            "engine.url",
            "engine.key",
            "engine.max_model_len",
            "engine.interrupt",
        ),
        *("policy.name", "policy.awaits", "policy.prices", "policy.reward_deadline_s", "reward.source", "reward.key"),
    ),
    "refine": (*EVERY, "topics", "governance", "policy.name", "policy.tenant", "reward.key"),
    "reward": (*EVERY, "policy.name", "reward"),
    "seal": (*EVERY, "topics", "policy"),
    "dispatch": (*EVERY, "topics", "policy", "rollout.agent"),
    "learn": (
        *EVERY,
        *("topics", "policy", "learner", "rollout.sampling"),
        *("engine.weights", "engine.kind", "engine.local", "engine.device"),
    ),
    "archive": (*EVERY, "archive"),
    "warehouse": (*EVERY, "topics", "policy.name", "warehouse"),
    "otlp": (*EVERY, "topics", "otlp", "gateway", "rollout.key", "policy", "reward", "engine.max_model_len"),
    "rollout": (*EVERY, "policy.name", "rollout", "gateway.host", "gateway.port", "gateway.keys"),
}
"""what each role reads, as sections or keys of them: the supervisor restarts it when one of these changes"""


def programs(settings: Settings, environment: Mapping[str, str]) -> list[Program]:
    """Every process of the deployment on this machine. `environment` leads each to the same settings."""
    out: list[Program] = []

    def add(
        name: str,
        role: str,
        *,
        stop_s: int = 15,
        restarts: bool = True,
        healthy_s: int = 10,
        process: int = 0,
        **variables: str,
    ) -> None:
        command = [sys.executable, "-P", "-m", "millrace.apps.cli.main", role]
        variables["MILLRACE_SETTINGS"] = _digest(settings, role)
        if process:
            variables[INDEX] = str(process)
        out.append(Program(name, command, {**environment, **variables}, stop_s, restarts, healthy_s))

    if settings.kafka.local:
        add(BROKER, "broker", stop_s=30)
    if settings.engine.local:
        add(ENGINE, "engine", healthy_s=30)
        add("reload", "reload")
    add("gateway", "gateway")
    for index in range(1, settings.gateway.processes):
        add(f"gateway-{index}", "gateway", process=index)
    for index in retired_indexes(settings, now_micros()):
        # It ends what it holds, and then well.
        add(f"gateway-{index}", "gateway", restarts=False, process=index)
    for role in ("refine", "reward", "seal", "dispatch"):
        if settings.shared or role not in SHARED_ROLES:
            add(role, role)
    if settings.otlp.enabled:
        add("otlp", "otlp")
    if settings.archive.keep:
        add("archive", "archive")
    threads = str(settings.learner.threads)
    for number in range(settings.learner.learners):
        # A learner that has reached its last version ends well and stays down.
        add(f"learn-{number}", "learn", restarts=False, OMP_NUM_THREADS=threads)
    if settings.rollout.agent:
        for number in range(settings.rollout.workers):
            add(f"rollout-{number}", "rollout")
    if settings.warehouse.enabled and settings.shared:
        add("warehouse", "warehouse", stop_s=30)
    return out


def _digest(settings: Settings, role: str) -> str:
    """Equal for settings between which a program of this role need not be restarted."""
    values = settings.model_dump()
    del values["learner"]["learners"], values["rollout"]["workers"]  # how many programs, not what any of them does
    read = {key: _value(values, key) for key in READS[role]} | {"keys": KEYS}
    if settings.adapters and role == ENGINE:
        read |= {"lora": values["learner"]["lora"], "eta": values["policy"]["eta"]}
    return _slow_digest(json.dumps(read, sort_keys=True, default=_text), str(settings.home))


def _value(values: Mapping[str, Mapping[str, object]], key: str) -> object:
    section, _, name = key.partition(".")
    return values[section][name] if name else values[section]


def _text(value: object) -> str:
    return str(value.get_secret_value()) if isinstance(value, SecretStr) else str(value)


@lru_cache(maxsize=64)  # each costs a twentieth of a second, and a deployment has one for each of its programs
def _slow_digest(text: str, salt: str) -> str:
    """It stands in files and environments: whoever reads it there must not get far by guessing."""
    return hashlib.scrypt(text.encode(), salt=salt.encode(), n=1 << 14, r=8, p=1, dklen=8).hex()
