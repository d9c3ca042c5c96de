"""Compiled rules lie where all deployments of a user find them, unless others could write there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace.streams.refine.detectors.rule_cache import VARIABLE, keep_rules


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, which is not there yet; nothing names another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back, whatever is set meanwhile
    monkeypatch.delenv(VARIABLE)
    return tmp_path / "user" / "millrace" / "kingfisher"


def kept(home: Path) -> Path:
    os.environ.pop(VARIABLE, None)
    keep_rules(home)
    return Path(os.environ[VARIABLE])


def test_deployments_of_a_user_share_them(cache: Path, tmp_path: Path) -> None:
    assert kept(tmp_path / "one") == kept(tmp_path / "two") == cache
    assert cache.stat().st_mode & 0o777 == 0o700


def test_the_environment_goes_before(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/named")
    keep_rules(tmp_path)
    assert os.environ[VARIABLE] == "/named"
    assert not cache.exists()


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_what_others_may_write_is_not_taken(cache: Path, tmp_path: Path, mode: int) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    assert kept(tmp_path / "home") == tmp_path / "home" / "cache" / "kingfisher"


def test_where_the_user_has_no_cache_a_deployment_has_its_own(cache: Path, tmp_path: Path) -> None:
    cache.parent.parent.write_text("a file, where a folder should be")
    assert kept(tmp_path / "home") == tmp_path / "home" / "cache" / "kingfisher"


def test_where_there_is_no_home_a_deployment_has_its_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert kept(tmp_path / "home") == tmp_path / "home" / "cache" / "kingfisher"
