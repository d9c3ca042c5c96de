"""The package as a user meets it: its public face, what is installed, and user code that lives beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
from pathlib import Path

import pytest

import millrace
from millrace.schemas import registry
from tests.support.house import ROOMS

ROOT = Path(millrace.__file__).parent
SITE = sysconfig.get_paths()["purelib"]


def python(code: str, cwd: Path, *, path: str = "") -> str:
    """What `code` prints when it runs as a program of its own in `cwd`."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_face() -> None:
    assert millrace.__all__ == ["AsyncSession", "Session", "errors", "tool"]
    assert millrace.tool.__module__ == "millrace.producers.tools"
    assert millrace.Session.__module__ == millrace.AsyncSession.__module__ == "millrace.producers.client"
    assert issubclass(millrace.errors.GatewayError, millrace.errors.MillraceError)
    assert set(millrace.__all__) <= set(dir(millrace))
    with pytest.raises(AttributeError, match="Session"):
        millrace.Sesion  # noqa: B018


def test_importing_the_package_loads_nothing_else(tmp_path: Path) -> None:
    code = "import sys, millrace; print([name for name in sys.modules if name.startswith('millrace.')])"
    assert python(code, tmp_path) == "[]"


def test_every_folder_with_code_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert listed == sorted({"millrace", *("millrace." + ".".join(folder.parts) for folder in folders)})
    assert [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


@pytest.mark.slow
def test_the_wheel_works_without_the_tree(tmp_path: Path) -> None:
    """Its dependencies are those of this environment; Millrace itself comes from the wheel alone."""
    tree = tmp_path / "tree"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "tests", "docs", "benchmarks")
    shutil.copytree(ROOT, tree, ignore=hidden)
    uv = ROOT / ".venv-tools/bin/uv"
    subprocess.run(
        [uv, "build", "-q", "--wheel", "--no-build-isolation", "-p", sys.executable, "-o", tmp_path, tree],
        check=True,
        timeout=250,
    )
    (wheel,) = tmp_path.glob("millrace-*.whl")
    empty = tmp_path / "empty"
    subprocess.run([uv, "venv", "-q", "-p", sys.executable, empty], check=True, timeout=120)
    subprocess.run([uv, "pip", "install", "-q", "-p", empty, "--no-deps", wheel], check=True, timeout=120)
    ran = subprocess.run(
        [empty / "bin/millrace", "config"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SITE},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert "namespace" in ran.stdout
    code = "import millrace; from millrace.schemas import registry; print(millrace.__file__, len(registry.names()))"
    shown = subprocess.run(
        [empty / "bin/python", "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SITE},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout.split()
    assert Path(shown[0]).is_relative_to(empty)
    assert int(shown[1]) == len(registry.names())


@pytest.fixture(params=["modules", "folders", "folders without __init__"])
def beside(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of a user, whose modules or folders have the names of our rooms."""
    for room in ROOMS:
        folder = tmp_path / room
        if request.param != "modules":
            folder.mkdir()
            (folder / "serve.py").write_text("raise RuntimeError('loaded in place of one of ours')\n")
        if request.param == "folders without __init__" and room != "schemas":
            continue  # a package by its place alone, as most people's folders are
        file = tmp_path / f"{room}.py" if request.param == "modules" else folder / "__init__.py"
        file.write_text(f"NAME = 'the user own {room}'\n")
    (tmp_path / "datasets.py").write_text("raise RuntimeError('loaded in place of a library')\n")
    source = """
        from schemas import NAME

        async def agent(task: dict, base_url: str, api_key: str) -> str:
            return NAME

        def verify(task: dict, output: str, episode: dict) -> float:
            return float(output == NAME)
    """
    (tmp_path / "my_agent.py").write_text(textwrap.dedent(source))
    return tmp_path


def test_user_modules_may_have_the_names_of_our_rooms(beside: Path) -> None:
    command = [Path(sys.executable).parent / "millrace", "config"]
    ran = subprocess.run(command, cwd=beside, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    code = """
        import asyncio
        from millrace.producers.rollout.agents import load_agent
        from millrace.streams.reward.verifiers import load

        said = asyncio.run(load_agent("my_agent:agent")({}, "", ""))
        import datasets  # the library, which a module of the user must not stand in for

        print(said, load("my_agent:verify")({}, said, {}), datasets.__name__)
    """
    assert python(textwrap.dedent(code), beside) == "the user own schemas 1.0 datasets"
