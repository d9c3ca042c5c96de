"""Adapters on an engine: the base that one needs, and which ones may go.

Invariants: an adapter is served on the very weights that it was trained on (their digest is checked, and the engine's
label names it); loading one stops nothing, and requests under way end with the adapter that they began with; those of
the newest versions stay, so a request that was routed a moment ago still finds its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from millrace.consumers.reloader.swap import swap
from millrace.infra.engines.control import EngineControl, EngineState
from millrace.infra.errors import ReloadError
from millrace.schemas.labels import base_label, parse_label
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import manifest


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The directory of full weights under an adapter, and their label in an engine."""

    folder: Path
    label: str


def base_of(folder: Path) -> AdapterBase:
    """The base of the adapter in `folder`, checked. Raises ReloadError when it is gone or changed."""
    try:
        about = json.loads((folder / "training.json").read_bytes())["lora"]
        base, digest = folder.parent / about["base"], str(about["digest"])
        found = manifest.base_digest(base)
    except (OSError, ValueError, KeyError, TypeError, CorruptCheckpoint) as error:
        raise ReloadError(f"the base of {folder} cannot be had ({error}); restore it") from error
    if found != digest:
        raise ReloadError(f"{base} is not the base that {folder} was trained on: restore it")
    return AdapterBase(base, base_label(digest))


def carries(state: EngineState, base: AdapterBase) -> bool:
    """Whether an engine serves these very weights, and nobody was interrupted while loading them."""
    return state.base == base.label and not state.paused


async def lay(control: EngineControl, base: AdapterBase) -> None:
    """Replace the weights of an engine by a base, under its label. Adapters on other weights go first."""
    await clear(control)
    await swap(control, lambda: control.load(base.folder), base.label, _nobody)


async def clear(control: EngineControl) -> None:
    """Take every adapter off a frozen engine: its weights are about to change under them."""
    names = await control.adapters()
    for name in names:
        await control.unload_adapter(name)
    if names:
        await control.abort()


def outdated(names: Iterable[str], policy: str, version: int, keep: int) -> list[str]:
    """Adapters of `policy` that no request can need any more, `version` being the newest: all but `keep`."""
    found = [(name, parse_label(name)) for name in names]
    return [name for name, named in found if named and named[0] == policy and named[1] <= version - keep]


async def _nobody() -> None:
    """A base is no version: there is nothing to acknowledge."""
