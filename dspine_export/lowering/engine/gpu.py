"""The GPU of this machine, asked through the driver alone, so that no CUDA framework has to be imported for it."""

from __future__ import annotations

import ctypes
from functools import cache

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@cache
def device_compute_capability() -> tuple[int, int] | None:
    """(major, minor) of device 0, or None where there is no driver or no device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    for attribute, value in ((_COMPUTE_CAPABILITY_MAJOR, major), (_COMPUTE_CAPABILITY_MINOR, minor)):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
    return major.value, minor.value
