"""Versions put together on the engine's own disk from the deltas that the learner wrote, so that little is read.

    cache/v{n}-{digest12}/      what engines read of the version, bit for bit as in its own directory

Invariants: names and digests of an event are checked before any becomes part of a path; whatever is composed passes the
checks of every weight directory, against the hashes of its event, before an engine sees it; a folder appears under its
name by one rename, so a reloader killed anywhere leaves a whole folder or a draft that the next one removes; what
cannot be composed is read whole, and that is said."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from millrace.consumers.reloader.directory import Signature, check, is_served, local_folder
from millrace.infra import durable, faults
from millrace.infra.errors import ReloadError
from millrace.schemas.records import WeightVersion
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import delta_files, manifest
from millrace.trainers.weights.manifest import Manifest

log = logging.getLogger(__name__)

MOST_FOLDERS = 2
"""composed versions that stay: the one served, and the one before it"""

Events = Mapping[int, WeightVersion]


def fetch(
    event: WeightVersion, events: Events, cache: Path | None, reference: Signature | None
) -> tuple[Path, Signature]:
    """The directory of a version, checked, and the signature of its tensors: composed in `cache` where its event names
    a delta, its own otherwise. Raises ReloadError when neither can be had."""
    if event["mode"] == "delta" and cache is not None:
        for _ in range(2):
            try:
                return compose(event, events, cache, reference)
            except (ReloadError, CorruptCheckpoint, OSError) as error:
                log.warning("version %d cannot be composed: %s", event["version"], error)
                if not folders(cache):
                    break
                clear(cache)  # what it began from may be damaged: begin from the anchor
        log.warning("version %d is read whole", event["version"])
    return check(event, reference)


def compose(event: WeightVersion, events: Events, cache: Path, reference: Signature | None) -> tuple[Path, Signature]:
    """The version in `cache`: there already, or from the newest version there on its chain, or from its anchor."""
    manifest.check_names(event["files"], event["digest"])
    target = cache / name_of(event)
    here: WeightVersion = {**event, "uri": str(target)}
    if target.is_dir():
        try:
            return check(here, reference)
        except ReloadError:
            shutil.rmtree(target)
    base, start, links = chain(event, events, cache)
    cache.mkdir(parents=True, exist_ok=True)
    with durable.drafting(target, sync=False) as draft:  # whoever reads it checks it
        draft.mkdir()
        deltas = [delta_files.read(local_folder(link["delta"] or ""), link["delta_hash"] or "") for link in links]
        delta_files.compose(base, deltas, draft)
        _copy_assets(event, start, base, draft)
        faults.point("reload.before_rename")
    faults.point("reload.after_rename")
    result = check(here, reference)
    log.info(
        "version %d: read %d bytes of changes since version %d, of %d bytes in all",
        event["version"],
        sum(link["delta_bytes"] or 0 for link in links),
        start["version"],
        event["full_bytes"] or 0,
    )
    return result


def chain(event: WeightVersion, events: Events, cache: Path) -> tuple[Path, WeightVersion, list[WeightVersion]]:
    """(directory to begin from, its event, the events whose deltas lead from it to `event`, in order). Raises
    ReloadError when a link is missing, CorruptCheckpoint when one has names that are none."""
    links = [event]
    while True:
        parent = events.get(-1 if links[-1]["parent"] is None else links[-1]["parent"])
        if parent is None:
            raise ReloadError(
                f"version {links[-1]['version']} is a delta, and the event of its parent is not there: keep the "
                "topic of weights whole, or wait for the next version that is published whole ([learner] anchor_every)"
            )
        manifest.check_names(parent["files"], parent["digest"])
        folder = cache / name_of(parent)
        if folder.is_dir():
            return folder, parent, links[::-1]
        if parent["mode"] != "delta":
            return local_folder(parent["uri"]), parent, links[::-1]
        links.append(parent)


def name_of(event: WeightVersion) -> str:
    """A version's name on a disk."""
    return f"v{event['version']}-{event['digest'][:12]}"


def folders(cache: Path) -> list[Path]:
    """What is composed, oldest version first."""
    paths = [path for path in cache.glob("v*-*") if path.is_dir()]
    return sorted(paths, key=lambda path: int(path.name[1:].partition("-")[0]))


def clear(cache: Path, *, keep: int = 0) -> None:
    """Remove drafts, and all composed versions but the newest `keep`."""
    for path in [*cache.glob(f"{durable.DRAFT}*"), *folders(cache)[: -keep or None]]:
        shutil.rmtree(path, ignore_errors=True)


def _copy_assets(event: WeightVersion, start: WeightVersion, base: Path, folder: Path) -> None:
    """Everything that engines read besides tensors: from `base` where it is the same there, else from the version's own
    directory. And its manifest, which its event repeats."""
    (folder / manifest.NAME).write_bytes(Manifest(event["files"]).to_bytes())
    for name, digest in event["files"].items():
        if is_served(name) and name != delta_files.WEIGHTS:
            is_same = start["files"].get(name) == digest and (base / name).is_file()
            shutil.copyfile((base if is_same else local_folder(event["uri"])) / name, folder / name)
