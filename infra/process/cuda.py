"""Whether CUDA can be used here, as the driver says. Importing torch to ask would take seconds."""

from __future__ import annotations

import ctypes

DRIVER = "libcuda.so.1"


def usable() -> bool:
    """Whether the driver is there and gives this process a device. CUDA_VISIBLE_DEVICES counts."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
