"""`--files`: directories against the weight events that name them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from millrace.consumers.audit import LawFinding, audit
from millrace.consumers.audit.laws import weights as audit_files
from millrace.trainers.weights.manifest import NAME, Manifest
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.history_records import POLICY


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
        said = {"uri": str(root), "digest": listing.digest, "files": dict(listing.files), "full_bytes": 9}
        if event["version"] == 6:
            delta = tmp_path / "deltas" / f"{root.name}.delta"
            delta.parent.mkdir()
            delta.write_bytes(b"changes")
            said |= {"mode": "delta", "delta": str(delta), "delta_bytes": 7}
            said |= {"delta_hash": hashlib.sha256(b"changes").hexdigest()}
        h.rewrite(record, event | said)
        if event["version"] < 4:
            shutil.rmtree(root)
    for record, entry in h.rows("ledger"):
        h.rewrite(record, entry | {"digest": digests[entry["version"]]})
    h.forge_ledger()
    return h


def files(h: History) -> LawFinding:
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


def say(h: History, version: int, **said: object) -> None:
    """Let the event of a version say something else."""
    record, event = next((record, event) for record, event in h.rows("weights") if event["version"] == version)
    h.rewrite(record, event | said)


@pytest.mark.parametrize("version", [5, 6])
def test_a_size_that_the_files_do_not_have_is_named(world: History, version: int) -> None:
    say(world, version, full_bytes=8)
    (violation,) = files(world).violations
    assert "says 8 bytes of weights, its files hold 9" in violation.message
    assert violation.ids == {"version": version}


def test_the_files_of_an_index_alone_are_counted(world: History) -> None:
    """What the index leaves out no engine loads."""
    root = directory(world, 5)
    listing = json.dumps({"weight_map": {"a": "model.safetensors"}}).encode()
    content = {"model.safetensors": b"weights 5", "other.safetensors": b"more", audit_files.INDEX: listing}
    for name, data in content.items():
        (root / name).write_bytes(data)
    manifest = Manifest({name: hashlib.sha256(data).hexdigest() for name, data in content.items()})
    (root / NAME).write_bytes(manifest.to_bytes())
    say(world, 5, files=dict(manifest.files), digest=manifest.digest)
    assert files(world).holds


def test_weights_beside_those_of_the_event_are_named(world: History) -> None:
    (directory(world, 5) / "more.safetensors").write_bytes(b"more")
    (violation,) = files(world).violations
    assert "more.safetensors" in violation.message


@pytest.mark.parametrize("said", [{"delta_bytes": 6}, {"delta_hash": "0" * 64}])
def test_a_delta_that_is_not_its_events_is_named(world: History, said: dict[str, object]) -> None:
    say(world, 6, **said)
    (violation,) = files(world).violations
    assert "the delta of version 6" in violation.message


def test_a_delta_that_was_collected_is_not_missed(world: History) -> None:
    shutil.rmtree(directory(world, 6).parent / "deltas")
    assert audit(world.bus, NS, POLICY, files=True).clean


def test_a_delta_elsewhere_is_named_without_reading_it(world: History) -> None:
    say(world, 6, delta="/elsewhere/changes")
    (violation,) = audit(world.bus, NS, POLICY).finding("weights").violations
    assert "delta" in violation.message


@pytest.mark.parametrize(
    ("name", "content", "template"),
    [
        ("chat_template.jinja", b"{{ x }}", b"{{ x }}"),
        ("tokenizer_config.json", b'{"chat_template": "y"}', b"y"),
        ("config.json", b"{}", b""),
    ],
)
def test_the_chat_template_of_version_0_is_the_policys(
    world: History, name: str, content: bytes, template: bytes
) -> None:
    root = directory(world, 0)
    root.mkdir()
    data = {"model.safetensors": b"weights 0", "config.json": b"{}", name: content}
    for file, text in data.items():
        (root / file).write_bytes(text)
    manifest = Manifest({file: hashlib.sha256(text).hexdigest() for file, text in data.items()})
    (root / NAME).write_bytes(manifest.to_bytes())
    said = {"files": dict(manifest.files), "digest": manifest.digest}
    say(world, 0, **said, template_hash=hashlib.sha256(template).hexdigest())
    assert files(world).holds
    say(world, 0, **said, template_hash="c" * 64)
    (violation,) = files(world).violations
    assert "chat template" in violation.message
