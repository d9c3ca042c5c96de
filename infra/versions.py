"""Where the directory of a weight version lies: at the path that its event names, or, where a deployment was moved,
under the same name beneath the root that is configured now.

Invariants: a name is taken from an event only where it is one that a learner gives (`v{n}-{digest}`), so nobody is led
out of the root; what is found under it still has to have the digest of its event, which whoever reads it checks."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from millrace.schemas.records import WeightVersion

NAME = re.compile(r"v\d+-[0-9a-f]{12}")
DELTA = re.compile(r"v\d+-[0-9a-f]{12}\.delta")
DELTAS = "deltas"


def local(uri: str) -> Path | None:
    """The path behind a path or a file URI; None for anything that is no path of this machine."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    if parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path)) if parts.scheme else Path(uri)


def located(event: WeightVersion, root: str | Path) -> WeightVersion:
    """The event with `uri` and `delta` as they are here. root: the configured directory of the policy's versions. What
    lies at neither place keeps its recorded path, so that errors name it."""
    delta = event["delta"]
    return {
        **event,
        "uri": _found(event["uri"], Path(_plain(root)), NAME),
        "delta": None if delta is None else _found(delta, Path(_plain(root), DELTAS), DELTA),
    }


def directory(event: WeightVersion, root: str | Path) -> Path:
    """The directory of a version, as `located` finds it."""
    uri = located(event, root)["uri"]
    return local(uri) or Path(uri)


def _found(uri: str, root: Path, names: re.Pattern[str]) -> str:
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


def _plain(root: str | Path) -> str:
    return str(root).removeprefix("file://")
