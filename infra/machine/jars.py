"""The broker's jars: named with their hashes in `kafka.lock`, fetched once from Maven Central into a cache of the user.

Invariants: nothing is on the class path that is not in the lock, and every jar's SHA-256 was checked when it entered
the cache. A complete set carries the name of the lock's digest, so a changed lock never meets the jars of another one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from millrace.infra import durable
from millrace.infra.errors import ServiceError

KAFKA = "4.4.0"
LOCK = Path(__file__).with_name("kafka.lock")


class Jar(NamedTuple):
    """Maven coordinates of one jar and the SHA-256 of its bytes."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


def cache_dir() -> Path:
    """Where downloads live that every deployment of this user shares (`XDG_CACHE_HOME` moves it)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millrace"


def locked_jars(lock: Path = LOCK) -> list[Jar]:
    """The jars that the lock names, sorted by file name."""
    lines = (line.split() for line in lock.read_text().splitlines() if line and not line.startswith("#"))
    return sorted((Jar(*fields) for fields in lines), key=lambda jar: jar.name)


def lock_text(jars: Iterable[Jar]) -> str:
    """The content of a lock that names these jars."""
    head = (
        "# The broker's jars, made by: python -m millrace.infra.machine.jars --lock."
        " Each line: group artifact version sha256"
    )
    return "\n".join([head, *(" ".join(jar) for jar in sorted(jars, key=lambda jar: jar.name))]) + "\n"


def class_path(cache: Path | None = None) -> list[Path]:
    """All jars of the lock, fetched first where the cache lacks them. Raises ServiceError when a jar cannot be had or
    differs from its hash.
    """
    jars = locked_jars()
    cache = cache or cache_dir()
    home = cache / f"kafka-{KAFKA}-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"
    paths = [home / jar.name for jar in jars]
    if not home.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with only_one(cache):
            if not home.is_dir():
                _fetch(jars, home)
    return paths


def _fetch(jars: list[Jar], home: Path) -> None:
    """Fill `home` in one rename, so that a killed download leaves nothing that looks complete."""
    from jgo.maven import MavenContext, PythonResolver

    work = Path(tempfile.mkdtemp(prefix="fetch-", dir=home.parent))
    try:
        context = MavenContext(resolver=PythonResolver(), repo_cache=work / "repository", timeout=60)

        def fetch(jar: Jar) -> None:
            artifact = context.project(jar.group, jar.artifact).at_version(jar.version).artifact()
            path = Path(artifact.resolve())
            if hashlib.sha256(path.read_bytes()).hexdigest() != jar.sha256:
                raise ServiceError(
                    f"{jar.name} from Maven Central is not the file that kafka.lock names: do not run it, fetch again"
                )
            shutil.copy(path, work / "libs" / jar.name)

        (work / "libs").mkdir()
        try:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(fetch, jars))
        except OSError as error:
            raise ServiceError(
                f"the broker's jars cannot be fetched from Maven Central ({error}): check the network, then try again"
            ) from error
        durable.name(work / "libs", home)
    finally:
        shutil.rmtree(work)


def resolve() -> list[Jar]:
    """What Maven Central gives for the broker now: the content of a new lock. `kafka-tools-api` is excluded: 4.4.0 of
    it is not on Central.
    """
    from jgo.maven import MavenContext, PythonResolver

    with tempfile.TemporaryDirectory() as work:
        context = MavenContext(resolver=PythonResolver(), repo_cache=Path(work), timeout=60)
        skip = [context.project("org.apache.kafka", "kafka-tools-api")]
        dependencies = [
            context.create_dependency(f"org.apache.kafka:kafka_2.13:{KAFKA}", exclusions=skip),
            context.create_dependency("org.slf4j:slf4j-simple:1.7.36"),
        ]
        direct, transitive = context.resolver.resolve(dependencies)
        artifacts = [d.artifact for d in direct + transitive if d.scope in (None, "compile", "runtime")]
        with ThreadPoolExecutor(8) as pool:
            paths = list(pool.map(lambda artifact: Path(artifact.resolve()), artifacts))
        return [
            Jar(a.groupId, a.artifactId, a.version, hashlib.sha256(p.read_bytes()).hexdigest())
            for a, p in zip(artifacts, paths, strict=True)
        ]


@contextmanager
def only_one(cache: Path) -> Iterator[None]:
    """Inside, no other process or thread makes anything in this cache, whose folder is there. Raises OSError."""
    with (cache / "kafka.flock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    if sys.argv[1:] == ["--lock"]:
        LOCK.write_text(lock_text(resolve()))
    else:
        print(os.pathsep.join(map(str, class_path())))
