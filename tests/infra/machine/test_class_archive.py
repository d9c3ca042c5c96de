"""The archive of Kafka's classes: named by what made it, mapped by what starts, needed by nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from millrace.infra.machine import class_archive
from millrace.infra.machine.broker import Broker
from millrace.infra.machine.class_archive import flags, place
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
    archive.touch()
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


@pytest.mark.slow
@pytest.mark.kafka
def test_a_broker_is_made_with_a_broken_archive_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.jsa"
    broken.write_bytes(bytes(range(256)) * 64)
    monkeypatch.setattr(class_archive, "place", lambda java, jars: broken)
    broker = Broker(tmp_path / "broker")
    broker.prepare()
    assert f"-XX:SharedArchiveFile={broken}" in broker.command()
    assert (broker.home / "data" / "meta.properties").is_file()
