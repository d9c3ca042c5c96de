"""CUDA is usable where the driver says so, and nowhere else."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from millrace.infra.process import cuda
from millrace.infra.process.cuda import DRIVER, driver, usable


class Driver:
    """Answers like libcuda: status codes, and a count through a pointer."""

    def __init__(self, began: int, counted: int, devices: int) -> None:
        self.began, self.counted, self.devices = began, counted, devices

    def cuInit(self, flags: int) -> int:
        return self.began

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.devices
        return self.counted


@pytest.mark.parametrize(
    ("driver", "there"),
    [
        (Driver(0, 0, 1), True),
        (Driver(0, 0, 8), True),
        (Driver(0, 0, 0), False),
        (Driver(0, 3, 1), False),
        (Driver(100, 0, 1), False),
        (None, False),
    ],
    ids=["one", "eight", "none", "no answer", "no device", "no driver"],
)
def test_it_is_what_the_driver_says(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, there: bool) -> None:
    def load(name: str) -> Driver:
        assert name == DRIVER
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert usable() is there


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@a)"
PLAIN = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version:  gcc 12.2.0"
)


@pytest.mark.parametrize(
    ("said", "version"), [(OPEN, "580.95.05"), (PLAIN, "535.183.01"), ("", "none"), (None, "none")]
)
def test_the_version_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str | None, version: str
) -> None:
    file = tmp_path / "version"
    if said is not None:
        file.write_text(said)
    monkeypatch.setattr(cuda, "DRIVER_VERSION", file)
    assert driver() == version
