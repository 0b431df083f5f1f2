"""What IREE's drivers tell of a device, as text."""

from __future__ import annotations

from functools import cache

import iree.runtime as rt

from halfbyte.runtime.iree_messages import IREE_ERRORS


@cache
def device_info(driver: str, path: str) -> str:
    """Returns what ``iree-run-module --dump_devices`` prints for a device of this machine, or nothing.

    Args:
        driver: IREE's name of it, e.g. ``vulkan``.
        path: the driver's name of the device; empty for the one that IREE takes, the first.
    """
    try:
        found = rt.get_driver(driver)
        for entry in found.query_available_devices():
            if path in ("", str(entry["path"])):
                return str(found.dump_device_info(entry["device_id"]))
    except IREE_ERRORS:
        pass
    return ""
