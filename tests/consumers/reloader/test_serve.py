"""Where a reloader composes versions."""

from __future__ import annotations

from pathlib import Path

from millrace.consumers.reloader.serve import cache_of
from millrace.infra.config import load

URL = "http://127.0.0.1:8901"


def test_an_engine_has_a_cache_of_its_own_where_it_can_see_it(tmp_path: Path) -> None:
    (tmp_path / "millrace.toml").write_text('home = "here"\n[engine]\nurl = "http://127.0.0.1:8901"\n')
    file = tmp_path / "millrace.toml"
    assert cache_of(load(file), URL) == tmp_path / "here" / "engines" / "engine-127.0.0.1-8901"
    assert cache_of(load(file, {"engine.local": False}), URL) is None
    shared = load(file, {"engine.local": False, "engine.cache": "/shared"})
    assert cache_of(shared, URL) == Path("/shared/engine-127.0.0.1-8901")
