"""Whether programs for GPUs can be run here, and how near to the references they have to be."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from halfbyte.runtime.device import devices, unavailable_drivers

Array = np.ndarray[Any, Any]
_ROUNDING = {
    np.dtype(np.float32): 1e-6,
    np.dtype(np.float16): float(np.finfo(np.float16).eps),
    np.dtype(ml_dtypes.bfloat16): float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps),
}


@functools.cache
def no_device(driver: str) -> str:
    """Why this machine cannot run programs of a driver, or nothing."""
    if any(device.driver == driver for device in devices()):
        return ""
    return f"no device of {driver}: {unavailable_drivers().get(driver, 'the runtime has no driver')}"


def no_vulkan() -> str:
    """Why this machine cannot run Vulkan programs, or nothing."""
    return no_device("vulkan")


def same_values(one: Array, other: Array) -> bool:
    """Value by value; a driver may change the sign of a zero."""
    return np.array_equal(one.astype(np.float32), other.astype(np.float32), equal_nan=True)


_LEAST_NORMAL = 2.0**-126


def far_rows(got: Array, want: Array, allowed: float | None = None) -> list[int]:
    """Rows that are further from the reference than rounding explains, relative to their largest value.

    NaN and infinities have to be where the reference has them. Devices may keep subnormal results, which are 0 there.
    """
    assert got.shape == want.shape and got.dtype == want.dtype
    made, right = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(right)
    out = []
    for row in range(len(right)):
        keep = finite[row]
        same = np.array_equal(made[row][~keep], right[row][~keep], equal_nan=True)
        error = np.abs(made[row][keep] - right[row][keep]).max(initial=0.0)
        largest = np.abs(right[row][keep]).max(initial=0.0)
        if not same or not error <= max((allowed or _ROUNDING[want.dtype]) * largest, _LEAST_NORMAL):
            out.append(row)
    return out
