"""Whether CUDA can be used here, as the driver says. Importing torch to ask would take seconds."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

DRIVER = "libcuda.so.1"
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
"""what the kernel module says of itself"""


def usable() -> bool:
    """Whether the driver is there and gives this process a device. CUDA_VISIBLE_DEVICES counts."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def driver() -> str:
    """The version of the driver, such as 570.124.06; none where nothing says it."""
    try:
        match = re.search(r"\s(\d+\.[\d.]+)\s", DRIVER_VERSION.read_text())
    except OSError:
        match = None
    return match[1] if match else "none"
