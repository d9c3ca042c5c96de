"""The archive of Kafka's classes: named by what made it, mapped by what starts, needed by nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.machine import class_archive
from millrace.infra.machine.broker import Broker
from millrace.infra.machine.class_archive import flags, is_intact, place, seal
from millrace.infra.machine.jars import class_path
from millrace.infra.machine.java import java
from millrace.infra.machine.make_class_archive import make


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "java"
    path.parent.mkdir()
    path.touch()
    return path


def jars(tmp_path: Path, version: str = "1") -> list[Path]:
    return [tmp_path / f"kafka-{version}" / "a.jar", tmp_path / f"kafka-{version}" / "b.jar"]


def test_another_java_or_other_jars_have_another_archive(tmp_path: Path, program: Path) -> None:
    first = place(program, jars(tmp_path))
    assert first.parent == tmp_path
    assert place(program, jars(tmp_path)) == first
    assert place(program, jars(tmp_path, "2")) != first
    os.utime(program, ns=(0, 1))
    assert place(program, jars(tmp_path)) != first, "the same path, updated"


def test_a_start_names_an_archive_only_where_it_is(tmp_path: Path, program: Path) -> None:
    assert flags(program, jars(tmp_path)) == []
    archive = place(program, jars(tmp_path))
    archive.write_bytes(b"classes")
    assert flags(program, jars(tmp_path)) == [], "nobody says that it is whole"
    seal(archive)
    assert flags(program, jars(tmp_path))[-1].endswith(str(archive))
    assert flags(tmp_path / "no" / "java", jars(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.kafka
def test_classes_come_from_the_archive_and_its_second_making_is_none(tmp_path: Path) -> None:
    archive = make()
    made = archive.stat()
    assert make().stat() == made
    log = tmp_path / "classes"
    tool = ["-cp", os.pathsep.join(map(str, class_path())), "kafka.tools.StorageTool", "random-uuid"]
    loads = [str(java()), *flags(java(), class_path()), f"-Xlog:class+load:file={log}", "-XX:+UseSerialGC"]
    subprocess.run([*loads, *tool], check=True, capture_output=True)
    found = [line for line in log.read_text().splitlines() if " org.apache.kafka." in line or " scala." in line]
    assert sum("source: shared objects file" in line for line in found) > len(found) / 2


@given(made=st.binary(min_size=1), found=st.binary(), sealed=st.binary() | st.none())
def test_only_the_bytes_that_were_made_are_mapped(made: bytes, found: bytes, sealed: bytes | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "a.jsa"
        archive.write_bytes(made)
        seal(archive)
        assert is_intact(archive)
        archive.write_bytes(found)
        assert is_intact(archive) == (found == made)
        if sealed is not None:
            (Path(folder) / "a.jsa.sha256").write_bytes(sealed)
            assert is_intact(archive) == (sealed == hashlib.sha256(found).hexdigest().encode())
        archive.unlink()
        assert not is_intact(archive)


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.parametrize("damage", ["cut", "torn", "other"])
def test_a_broker_is_made_whatever_lies_in_the_place_of_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    good, broken = make(), tmp_path / "broken.jsa"
    shutil.copy(good, broken)
    seal(broken)
    broken.chmod(0o600)
    size = good.stat().st_size
    if damage == "cut":
        os.truncate(broken, size // 2)
    elif damage == "torn":
        with broken.open("r+b") as file:  # as a power cut leaves what was never written
            file.seek(size // 4)
            file.write(bytes(size // 2))
    else:
        broken.write_bytes(bytes(range(256)) * 64)
    monkeypatch.setattr(class_archive, "place", lambda java, jars: broken)
    broker = Broker(tmp_path / "broker")
    broker.prepare()
    assert (broker.home / "data" / "meta.properties").is_file()
