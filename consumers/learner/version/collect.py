"""Which weight directories may go.

Invariants: a directory goes only when it can never be a version (its number is committed under another digest) or when
nobody needs it (no live engine serves it, it is not among the newest nor the anchor of one, not version 0 nor one that
is kept for good, not pins, no base of another's adapter); the deltas that lead from an anchor to one of the newest
stay with it. No clock is asked, so a leader that was frozen between looking and deleting deletes nothing that its
successor wrote: versions are dense, and what is committed never changes. `choose` is pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from millrace.infra import durable
from millrace.infra.log.base import Bus
from millrace.infra.log.history import newest
from millrace.infra.log.history.kinds import WORKERS
from millrace.infra.log.history.newest import Head
from millrace.infra.log.history.reader import History, left_out
from millrace.infra.versions import DELTA, DELTAS, NAME, PIN, directory, remove

TEMPORARY = re.compile(r"\.tmp-v(?P<version>\d+)-[0-9a-f]+(-damaged)?")


def choose(
    names: Iterable[str],
    digests: Mapping[int, str],
    *,
    keep: int,
    serving: Collection[int],
    pins: Collection[str],
    deltas: Collection[int] = (),
    every: int = 0,
) -> list[str]:
    """The directory names to remove.

    digests: digest by version, up to the newest; a version of which none is known stays; keep: how many of the newest
    stay; serving: versions that live engines have loaded or load; deltas: versions that engines read as changes to
    their parent; every: each version that this divides stays, 0: none but the first."""
    anchors, _ = chains(max(digests, default=-1), keep, deltas)
    newest = max(digests, default=-1)
    out = []
    for name in names:
        version = re.fullmatch(NAME, name)
        temporary = re.fullmatch(TEMPORARY, name)
        if temporary and int(temporary["version"]) <= newest:
            out.append(name)
        elif version and int(version["version"]) <= newest and name not in pins:
            number = int(version["version"])
            if number not in digests:
                continue  # its record cannot be read, so nobody can tell an orphan from it
            orphan = digests[number][:12] != version["digest"]
            is_anchor = number == 0 or (every > 0 and number % every == 0)
            is_needed = is_anchor or number > newest - keep or number in serving or number in anchors
            if orphan or not is_needed:
                out.append(name)
    return sorted(out)


def chains(newest: int, keep: int, deltas: Collection[int]) -> tuple[set[int], set[int]]:
    """(versions whose whole weights, versions whose deltas) a late engine needs to compose one of the newest `keep`."""
    anchors, links = set(), set()
    for version in range(max(0, newest - keep + 1), newest + 1):
        while version in deltas:
            links.add(version)
            version -= 1
        anchors.add(version)
    return anchors, links


def choose_deltas(names: Iterable[str], digests: Mapping[int, str], *, keep: int, deltas: Collection[int]) -> list[str]:
    """The names of delta files to remove: of orphans, drafts, and versions whose chain nobody composes any more."""
    newest = max(digests, default=-1)
    _, links = chains(newest, keep, deltas)
    out = []
    for name in names:
        draft = durable.final_name(name)
        match = re.fullmatch(DELTA, draft or name)
        if match and int(match["version"]) <= newest:
            version = int(match["version"])
            is_recorded = digests.get(version, match["digest"])[:12] == match["digest"]
            is_needed = version in links and is_recorded and not draft
            if not is_needed:
                out.append(name)
    return sorted(out)


def serving_versions(bus: Bus, workers_topic: str, policy: str, now: int) -> set[int]:
    """Versions that engines which are alive at `now` (micros) say they have or are loading."""
    history = History(bus, workers_topic.partition(".")[0], policy)
    versions = set()
    for record in history.newest_by_key(WORKERS).values():
        row = history.row(WORKERS, record, left_out)  # what is no status is no engine's
        is_ours = row is not None and row["role"] == "engine" and row["policy"] == policy and row["expires_at"] > now
        if row is not None and is_ours and row["version"] is not None:
            versions.add(int(row["version"]))
    return versions


def newer(bus: Bus, topics: Mapping[str, str], head: Head, root: Path) -> Head | None:
    """The newest version, where `head` was collected after later ones; None while its directory must be there.

    topics: full names by last word; root: where the policy's versions lie. Raises UnreachableError when the log does
    not answer, LedgerError when it cannot be believed."""
    if directory(head.weights, root).exists():
        return None
    later = newest.head(bus, topics["weights"], topics["ledger"])
    return later if later is not None and later.version > head.version else None


def base_of(version: Path) -> str:
    """Name of the directory beside this one whose weights its adapter was trained on; empty without an adapter."""
    try:
        return str(json.loads((version / "training.json").read_bytes())["lora"]["base"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def collect(
    root: Path,
    digests: Mapping[int, str],
    *,
    keep: int,
    serving: Collection[int],
    deltas: Collection[int] = (),
    every: int = 0,
) -> list[str]:
    """Remove from `root` what `choose` and `choose_deltas` name; gives the directories' names."""
    names = [path.name for path in root.iterdir() if path.is_dir()]
    pins = {name for name in names if (root / name / PIN).exists()} | {base_of(root / name) for name in names}
    directories = choose(names, digests, keep=keep, serving=serving, pins=pins, deltas=deltas, every=every)
    directories = [name for name in directories if remove(root / name)]
    folder = root / DELTAS
    files = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    for name in choose_deltas(files, digests, keep=keep, deltas=deltas):
        (folder / name).unlink(missing_ok=True)
    return directories
