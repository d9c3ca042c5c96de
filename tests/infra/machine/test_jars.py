"""The lock of the broker's jars: what is written is what is read."""

from __future__ import annotations

from pathlib import Path

from millrace.infra.machine.jars import LOCK, Jar, lock_text, locked_jars


def test_a_lock_names_every_jar_that_it_was_made_of(tmp_path: Path) -> None:
    jars = [Jar("org.b", "two", "2", "f" * 64), Jar("org.a", "one", "1", "0" * 64)]
    lock = tmp_path / "kafka.lock"
    lock.write_text(lock_text(jars))
    assert locked_jars(lock) == jars[::-1]


def test_the_lock_is_as_it_would_be_written() -> None:
    assert lock_text(locked_jars()) == LOCK.read_text()
