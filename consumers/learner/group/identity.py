"""What must be equal among learners that train together: configuration, code, libraries; and how they show it.

Invariants: hashes cover exactly what changes training, and models by their content, wherever they lie; what the hash of
the configuration is taken of holds no secret, since the ledger keeps it; a member shows the hashes in its client id, so
the group's table alone says who differs, before anybody forms anything; a frozen model is read once a process, and
again where its files were written since. CPU and driver are recorded, never compared among them.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from millrace.consumers.learner.group import layouts
from millrace.infra import config
from millrace.infra.config import Settings, masking
from millrace.infra.errors import ConfigError
from millrace.infra.process import cuda
from millrace.trainers.backends.layout import DEEPSPEED, FROZEN, MEGATRON
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights.manifest import base_digest

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "numpy", "fastavro", "confluent-kafka")
OF_BACKEND: Mapping[str, tuple[str, ...]] = {DEEPSPEED: ("deepspeed",), MEGATRON: ("megatron-core",)}
"""libraries that train by a backend -> what it adds"""
DRIVER = "driver"
"""the GPU's, which is recorded and compared by proofs, and may differ among machines that train together"""
CODE = ("schemas", "trainers", "consumers/learner", "infra/log/history")
NOT_TRAINING = frozenset(
    {
        "learners",
        "host",
        "keep",
        "keep_every",
        "offload",
        "session_timeout_s",
        "max_versions",
        "collective_timeout_s",
        "anchor_every",
        "trackers",
    }
)
"""settings of [learner] that may differ among learners"""
TAG_CHARS = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """Hex digests of configuration and code, library versions by name, and a digest of the CPU's flags. text: what
    `config` is the sha256 of; models: content of the models that a step reads beside its own, by role."""

    config: str
    code: str
    libraries: Mapping[str, str]
    cpu: str
    text: str = ""
    models: Mapping[str, str] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        """What the client id says: configuration, code and libraries, shortened."""
        return "-".join(part[:TAG_CHARS] for part in (self.config, self.code, library_hash(self.libraries)))


def library_hash(libraries: Mapping[str, str]) -> str:
    """Hex digest of library versions, which the driver is not among."""
    return _json_digest({name: version for name, version in sorted(libraries.items()) if name != DRIVER})


def libraries(backends: Collection[str], *, gpu: bool) -> dict[str, str]:
    """Versions by name of what these backends train with here; gpu: on a GPU, so by its kernels and driver too."""
    names = [*LIBRARIES, *(name for backend in sorted({*backends}) for name in OF_BACKEND.get(backend, ()))]
    versions = {"python": platform.python_version(), **{name: _version(name) for name in names}}
    if gpu:
        import torch  # seconds, and whoever asks has it loaded anyway

        kernels = {name: _version(name) for name in ("triton", "liger-kernel", "flash-attn")}
        versions |= {**kernels, "cuda": torch.version.cuda or "none", DRIVER: cuda.driver()}
    return versions


def _version(name: str) -> str:
    """none: what needs it says so itself, and how to get it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def identify(settings: Settings) -> Identity:
    """Of this process. Raises ConfigError where a model that `[learner]` names cannot be read."""
    models = digests(settings.learner)
    backends = [place.layout.backend for place in layouts.role_places(settings.learner)]
    text = configuration(settings, models)
    return Identity(
        config=hashlib.sha256(text.encode()).hexdigest(),
        code=code_hash(),
        libraries=libraries(backends, gpu=cuda.usable()),
        cpu=cpu_hash(),
        text=text,
        models=models,
    )


def configuration(settings: Settings, models: Mapping[str, str]) -> str:
    """JSON of the settings that change training, with the digests of models in place of their directories."""
    training = {k: v for k, v in settings.learner.model_dump(mode="json").items() if k not in NOT_TRAINING}
    training["backend"] = layouts.canonical(settings.learner)
    training |= {role: f"sha256:{digest}" for role, digest in models.items()}
    content = {"learner": training, "policy": settings.policy.name, "release": settings.policy.release}
    return json.dumps(masking.in_values(content), sort_keys=True)


@cache
def code_hash() -> str:
    """sha256 hex over the sources that training runs through."""
    root = Path(__file__).parent.parent.parent
    files = [path for name in CODE for path in ([root / name] if name.endswith(".py") else (root / name).rglob("*"))]
    digest = hashlib.sha256()
    for path in sorted(files):
        if path.suffix in (".py", ".avsc"):
            digest.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@cache
def cpu_hash() -> str:
    """Hex digest of architecture and CPU flags, which decide the last bits of a result."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return _json_digest([platform.machine(), sorted(flags)])[:16]


def tag_of(client_id: str) -> str:
    """What a member's client id shows of its identity."""
    return client_id.rpartition("@")[0].partition("/")[2]


def tag_differences(tags: Sequence[str], ledger: str) -> dict[int, str]:
    """index -> in what, for members that differ from the right one: the ledger's identity, where some member has it,
    else the first member's."""
    if not tags:
        return {}
    right = ledger if ledger in tags else tags[0]
    return {index: _difference(one, right) for index, one in enumerate(tags) if one != right}


def _difference(one: str, right: str) -> str:
    names = ("configuration", "code", "libraries")
    parts = zip(names, one.split("-"), right.split("-"), strict=False)
    return " and ".join(name for name, part, right_part in parts if part != right_part) or "its client id"


def _json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def digests(learner: config.Learner) -> dict[str, str]:
    """sha256 hex over configuration and weights of each frozen model that `[learner]` names, by role. Raises
    ConfigError for a directory that cannot be read."""
    models = {role: Path(path) for role in FROZEN if (path := getattr(learner, role))}
    return {role: _model_digest(role, directory) for role, directory in models.items()}


def _model_digest(role: str, directory: Path) -> str:
    try:
        files = sorted(
            path for path in directory.iterdir() if path.name == "config.json" or path.suffix == ".safetensors"
        )
        states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return _content(directory, tuple(states))
    except (CorruptCheckpoint, OSError) as error:
        raise ConfigError(
            f"[learner] {role}: {directory} cannot be read ({error}): name a directory with a model in Hugging Face "
            "layout"
        ) from None


@cache
def _content(directory: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """files: name, size and time of each, so that what changed is read again."""
    return base_digest(directory)
