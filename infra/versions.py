"""Where the directory of a weight version lies: at the path that its event names, or, where a deployment was moved,
under the same name beneath the root that is configured now; and how such a directory is removed.

Invariants: a name is taken from an event only where it is one that a learner gives (`v{n}-{digest}`), so nobody is led
out of the root; what is found under it still has to have the digest of its event, which whoever reads it checks. A
version is removed by `remove` alone: it loses its name by one rename before its files go, so that under the name of a
version there is everything or nothing, and one that is pinned stays."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from millrace.infra import durable, faults
from millrace.schemas.records import WeightVersion

NAME = re.compile(r"v(?P<version>\d+)-(?P<digest>[0-9a-f]{12})")
DELTA = re.compile(NAME.pattern + r"\.delta")
DELTAS = "deltas"
PIN = "PINNED"
"""a file of this name beside the weights keeps a version for good"""

log = logging.getLogger(__name__)


def local(uri: str) -> Path | None:
    """The path behind a path or a file URI; None for anything that is no path of this machine."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    if parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path)) if parts.scheme else Path(uri)


def locate(event: WeightVersion, root: str | Path) -> WeightVersion:
    """The event with `uri` and `delta` as they are here. root: the configured directory of the policy's versions. What
    lies at neither place keeps its recorded path, so that errors name it."""
    delta = event["delta"]
    return {
        **event,
        "uri": _present_uri(event["uri"], Path(_path_text(root)), NAME),
        "delta": None if delta is None else _present_uri(delta, Path(_path_text(root), DELTAS), DELTA),
    }


def directory(event: WeightVersion, root: str | Path) -> Path:
    """The directory of a version, as `locate` finds it."""
    uri = locate(event, root)["uri"]
    return local(uri) or Path(uri)


def _present_uri(uri: str, root: Path, names: re.Pattern[str]) -> str:
    path = local(uri)
    if path is None or here(path):
        return uri
    beneath = root / path.name
    return str(beneath) if names.fullmatch(path.name) and here(beneath) else uri


def here(path: Path) -> bool:
    """Whether something lies at a path that an event named, whatever that is."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no disk takes, or a folder that is closed to us
        return False


def _path_text(root: str | Path) -> str:
    return str(root).removeprefix("file://")


def remove(version: Path) -> bool:
    """Remove the directory of a version, or a draft of one; gives whether it is gone. A process that dies inside leaves
    a draft, which the next sweep removes; a directory that cannot be renamed, or is pinned, stays."""
    draft = version
    if name := NAME.fullmatch(version.name):
        if (version / PIN).exists():
            return False
        draft = durable.draft_of(version.with_name(f"v{name['version']}"))
        try:
            version.rename(draft)
            if (draft / PIN).exists():  # it was pinned between the look and the rename
                draft.rename(version)
                return False
        except OSError as error:
            log.warning("%s cannot be removed: %s", version, error)
            return False
        faults.point("versions.in_removal")
    shutil.rmtree(draft, ignore_errors=True)
    faults.point("versions.after_removal")
    return True
