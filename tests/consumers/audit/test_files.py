"""`--files`: directories against the weight events that name them."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from consumers.audit import Finding, audit
from consumers.audit import files as audit_files
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.history_records import POLICY
from trainers.manifest import NAME, Manifest


@pytest.fixture
def world(tmp_path: Path) -> History:
    """A world whose versions have directories; all but the last three were collected."""
    h = History(0)
    digests = {}
    for record, event in h.rows("weights"):
        content = {"model.safetensors": f"weights {event['version']}".encode(), "config.json": b"{}"}
        listing = Manifest({name: hashlib.sha256(data).hexdigest() for name, data in content.items()})
        root = tmp_path / f"v{event['version']}-{listing.digest[:12]}"
        root.mkdir()
        for name, data in content.items():
            (root / name).write_bytes(data)
        (root / NAME).write_bytes(listing.to_bytes())
        digests[event["version"]] = listing.digest
        h.rewrite(record, event | {"uri": str(root), "digest": listing.digest, "files": dict(listing.files)})
        if event["version"] < 4:
            shutil.rmtree(root)
    for record, entry in h.rows("ledger"):
        h.rewrite(record, entry | {"digest": digests[entry["version"]]})
    h.forge_ledger()
    return h


def files(h: History) -> Finding:
    return audit(h.bus, NS, POLICY, files=True).finding("files")


def directory(h: History, version: int) -> Path:
    return next(Path(event["uri"]) for _, event in h.rows("weights") if event["version"] == version)


def test_what_was_collected_is_counted_and_what_is_kept_is_whole(world: History) -> None:
    report = audit(world.bus, NS, POLICY, files=True)
    assert report.clean, report.violations[:3]
    assert report.finding("files").facts == {"directories": 3, "collected": 4}
    assert report.finding("files").checked == 9


def test_what_a_live_learner_collects_meanwhile_is_not_missed(
    world: History, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All versions that were there go while the first file of each is read; the log has a newer one by then."""
    later = world.rows("weights")[-1][1]

    def read(filesystem: object, path: str) -> str:
        hashed = sha256(filesystem, path)
        gone = Path(path).parent
        if gone != newer:
            shutil.rmtree(gone)
        if gone == directory(world, 6) and not newer.exists():
            shutil.copytree(kept, newer)
            world.append("weights", "WeightVersion", later | {"version": 7, "uri": str(newer)}, POLICY)
        return hashed

    sha256, kept, newer = audit_files._sha256, tmp_path / "kept", tmp_path / "newer"
    shutil.copytree(directory(world, 6), kept)
    monkeypatch.setattr(audit_files, "_sha256", read)
    report = audit(world.bus, NS, POLICY, files=True)
    assert report.clean, report.violations[:3]
    assert report.finding("files").facts == {"directories": 1, "collected": 7}


def test_files_are_not_looked_at_unless_asked(world: History) -> None:
    shutil.rmtree(directory(world, 6))
    assert audit(world.bus, NS, POLICY).clean


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", NAME])
def test_a_changed_file_is_named(world: History, name: str) -> None:
    path = directory(world, 5) / name
    path.write_bytes(path.read_bytes()[:-1])
    (violation,) = files(world).violations
    assert name.split(".")[0] in violation.message
    assert violation.ids["version"] == 5


@pytest.mark.parametrize("name", ["model.safetensors", NAME])
def test_a_missing_file_is_named(world: History, name: str) -> None:
    (directory(world, 5) / name).unlink()
    (violation,) = files(world).violations
    assert name in violation.message


def test_the_newest_version_must_be_there(world: History) -> None:
    shutil.rmtree(directory(world, 6))
    (violation,) = files(world).violations
    assert "newest version 6" in violation.message
