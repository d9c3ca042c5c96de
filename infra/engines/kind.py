"""What Millrace must know of a kind of engine: how one starts here, what it runs on, who speaks with it.

Invariants: whatever differs between kinds stands behind `EngineKind`, and nobody outside `infra/engines` asks which
kind an engine is; a kind imports what it needs (torch, HTTP clients) only where it is used, since every command reads
the list of kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from millrace.infra.engines.bearer import Key

if TYPE_CHECKING:
    from millrace.infra.engines.base import Engine
    from millrace.infra.engines.control import EngineControl

Device = Literal["auto", "cpu", "cuda"]
RECEIVER = "millrace.consumers.reloader.receiving:receive"
"""the function by which a process of an engine receives a broadcast: by its name, since it needs the trainers' room"""


class AdapterRoom(NamedTuple):
    """The largest rank of an adapter, and how many adapters are served at once."""

    rank: int
    adapters: int


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine to start on this machine, on the weights in the directory `model`, which it serves as `name`.

    home: for its own files; max_model_len: 0 for the model's own; kv_cache_mb: on a CPU; args: more arguments, as the
    user wrote them; broadcasts: whether it takes weights from a learner; adapters: None where it serves none."""

    home: Path
    url: str
    model: str
    name: str
    device: Device = "auto"
    max_model_len: int = 0
    max_num_seqs: int = 64
    kv_cache_mb: int = 256
    args: Sequence[str] = ()
    key: str = ""
    broadcasts: bool = False
    adapters: AdapterRoom | None = None


class Launch(NamedTuple):
    """The command line of an engine, and the variables that it needs beside those of every service."""

    command: list[str]
    environment: dict[str, str]


class EngineKind(ABC):
    """One kind of engine."""

    name: ClassVar[str]
    """as `[engine] kind` has it"""
    packages: ClassVar[tuple[str, ...]] = ()
    """names of the packages that may bring it"""
    serves_adapters: ClassVar[bool] = False

    @abstractmethod
    def launch(self, engine: LocalEngine) -> Launch:
        """Prepare the start of an engine on this machine. Raises ServiceError, with what to do, where it cannot run."""

    @abstractmethod
    def runs_on(self, device: Device) -> str:
        """What a local engine runs on here. Raises ServiceError, with what to install, where it cannot run."""

    def warning(self, device: Device) -> str | None:
        """What is wasted on this machine by what is installed, and what to do; None for nothing."""
        return None

    def refusal(self, device: Device, config: Mapping[str, object]) -> str | None:
        """Why a local engine cannot serve versions of a model of this config.json, and what to do; None: it can."""
        return None

    @abstractmethod
    def client(self, url: str, key: Key, absent_patience_s: float | None = None) -> Engine:
        """Who samples from the engine at `url`. absent_patience_s: how long a request waits while nothing listens
        there; None: as long as it waits for a busy one."""

    @abstractmethod
    def control(self, url: str, key: Key, device: Device | None = None) -> EngineControl:
        """Who changes the weights of the engine at `url`. device: that of a local engine; None: it is of another
        machine."""
