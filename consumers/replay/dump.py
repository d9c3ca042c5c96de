"""A step as a folder that trains without the log: the debugger of a bad step.

    DIR/v12/
        step.json, samples.safetensors      what the ranks train on (`material`); what is on record of the version
        versions/v11-<digest>/              the weights that the step begins with, and the base of an adapter
        rank0.safetensors, rank0.json ...   the micro-batches as they trained (`rank_worker`)
        result.json                         what came of it: digest, files, metrics

Invariant: a folder holds all that decides a bit, but for code, libraries, machine and frozen models, which it names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from millrace.consumers.learner.version.collect import base_of
from millrace.consumers.replay import material
from millrace.consumers.replay.material import Material
from millrace.consumers.replay.orders import TrainedStep
from millrace.consumers.replay.version_history import RecordedVersion
from millrace.infra.errors import ProofError
from millrace.schemas.records import LedgerEntry

VERSIONS, RESULT = "versions", "result.json"
_ENTRY = (
    "policy",
    "version",
    "ranks",
    "layout",
    "unchanged",
    "digest",
    "libraries",
    "cpu",
    "config_hash",
    "code_hash",
    "metrics",
    "eta",
    "config",
    "models",
    "device",
    "threads",
)
"""fields of the ledger entry that a dump keeps"""


class Dump:
    """Steps under `folder`, each in a new folder of its own. Raises ProofError where one is there already."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, version: RecordedVersion, step: Material, base: Path) -> Path:
        """Write down what the step trains on, from the weights in `base`; gives its folder."""
        folder = self._folder / f"v{version.number}"
        try:
            folder.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            raise ProofError(f"{folder} is there already: name another folder for --dump, or remove it") from None
        entry: Mapping[str, Any] = version.entry
        step.write(
            folder,
            entry={name: entry[name] for name in _ENTRY},
            files=dict(version.weights["files"]),
            start=base.name,
        )
        for path in (base, *([base.parent / beside] if (beside := base_of(base)) else [])):
            # Copies: what is dumped is there to be changed, and the version must not be.
            shutil.copytree(path, folder / VERSIONS / path.name, dirs_exist_ok=True)
        return folder

    def end(self, folder: Path, trained: TrainedStep) -> None:
        """Write down what came of it."""
        result = {
            "digest": trained.digest,
            "files": dict(trained.files),
            "unchanged": trained.unchanged,
            "metrics": dict(trained.metrics),
        }
        (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n")


def on_record(folder: Path) -> tuple[LedgerEntry, Mapping[str, str], Path]:
    """What a dumped step says of its version: the ledger entry as far as it is kept, the files of the version (name ->
    sha256 hex), and the directory to begin with. Raises ProofError for what is no dumped step."""
    about = material.said(folder)
    try:
        entry, files, start = about["entry"], about["files"], folder / VERSIONS / str(about["start"])
        missing = [name for name in _ENTRY if name not in entry]
    except (KeyError, TypeError) as error:
        raise ProofError(f"{folder / material.STEP} lacks {error}: dump the step again") from error
    if missing or not start.is_dir():
        raise ProofError(f"{folder} lacks {missing[0] if missing else start}: dump the step again")
    return cast(LedgerEntry, entry), files, start
