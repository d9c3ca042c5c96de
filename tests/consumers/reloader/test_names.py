"""Whoever writes weight events names files inside a version's directory, or nothing at all is touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millrace.consumers.reloader.compose import compose, fetch
from millrace.consumers.reloader.directory import check
from millrace.infra.errors import ClaimError, ReloadError
from millrace.infra.log.blobs import ClaimStore
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import manifest
from millrace.trainers.weights.manifest import Manifest, is_plain
from tests.consumers.reloader.chains import Chain, write_chain

TAKEN = (".json", ".txt", ".jinja", ".model", ".safetensors")
PARTS = st.sampled_from(["..", ".", "", "a", "/", "\\", "\x00", "\x1b", "\u202e", "~", "C:", "settings.json", "e"])
HOSTILE = st.builds(
    lambda parts, separator, ending: separator.join(parts) + ending,
    st.lists(PARTS, min_size=1, max_size=5),
    st.sampled_from(["/", "\\", ""]),
    st.sampled_from(TAKEN),
)


@pytest.fixture(scope="module")
def chain(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return write_chain(folders[0], tmp_path_factory.mktemp("weights"), 2)


@given(st.one_of(HOSTILE, st.text(max_size=300)))
@example("../../victim/settings.json")
@example("/etc/passwd.json")
@example("manifest.json")
@example("a" * 256)
def test_a_plain_name_stays_in_its_directory(name: str) -> None:
    folder = Path("/versions/v1")
    if is_plain(name):
        path = folder / name
        assert (path.parent, path.name) == (folder, name)
        assert name.isprintable()
        assert path != folder / manifest.NAME
        assert len(name.encode()) <= 255
    else:
        with pytest.raises(CorruptCheckpoint):
            manifest.check_names({name: "0" * 64}, "0" * 64)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(name=HOSTILE.filter(lambda name: not is_plain(name)), where=st.sampled_from(["files", "digest", "parent"]))
@example(name="../../victim/settings.json", where="files")
@example(name="../../../victim", where="digest")
def test_a_hostile_event_writes_reads_and_removes_nothing(
    chain: Chain, tmp_path_factory: pytest.TempPathFactory, name: str, where: str
) -> None:
    home = tmp_path_factory.mktemp("home")
    cache, victim = home / "a" / "cache", home / "victim"
    cache.mkdir(parents=True)
    victim.mkdir()
    (victim / "settings.json").write_text("mine")
    before = sorted(home.rglob("*"))
    events: dict[int, Any] = {version: dict(event) for version, event in chain.events.items()}
    spoilt = events[1 if where == "parent" else 2]
    spoilt |= {"digest": name} if where == "digest" else {"files": {**spoilt["files"], name: "0" * 64}}
    with pytest.raises((CorruptCheckpoint, ReloadError)):
        compose(events[2], events, cache, None)
    if where != "parent":
        with pytest.raises(ReloadError):
            fetch(events[2], events, cache, None)
    assert sorted(home.rglob("*")) == before
    assert (victim / "settings.json").read_text() == "mine"
    shutil.rmtree(home)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "", 7])
def test_an_index_cannot_lead_engines_outside(chain: Chain, tmp_path: Path, name: object) -> None:
    folder = Path(shutil.copytree(chain.folder(0), tmp_path / "v0"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ReloadError, match=r"index\.json is damaged"):
        check({**chain.events[0], "uri": str(folder)}, None)


@given(st.one_of(HOSTILE, st.text(max_size=70)))
def test_a_manifest_with_a_hostile_name_is_no_manifest(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("version")
    (folder / manifest.NAME).write_bytes(Manifest({name: "0" * 64}).to_bytes())
    if is_plain(name):
        assert manifest.load(folder).files == {name: "0" * 64}
    else:
        with pytest.raises(CorruptCheckpoint, match="plain file name"):
            manifest.load(folder)


@given(name=st.one_of(HOSTILE, st.text(max_size=70)), of=st.sampled_from(["uri", "sha256"]))
def test_a_claim_opens_nothing_outside_its_store(tmp_path_factory: pytest.TempPathFactory, name: str, of: str) -> None:
    home = tmp_path_factory.mktemp("claims")
    store = ClaimStore(str(home / "store"))
    claim = store.store("Event", b"x")
    (home / "secret").write_bytes(b"x")
    hostile = {**claim, of: name}
    if hostile != claim:
        with pytest.raises(ClaimError):
            store.load(hostile)
