"""What a Vulkan device can do, as IREE's driver tells it, to compare with what a program needs."""

from __future__ import annotations

import re
from functools import cache

import iree.runtime as rt

from halfbyte.runtime.iree_messages import IREE_ERRORS


def parse_device_info(text: str) -> frozenset[str]:
    """Returns the features of a device.

    Args:
        text: as ``iree-run-module --dump_devices=vulkan`` prints it for one device.

    Returns:
        The names behind ``features:`` that are ``yes``, ``vulkan-1.3`` if that tier is supported, and
        ``subgroupSize<n>`` for every size that a program may ask for.
    """
    found = set(re.findall(r"\b(\w+)=yes\b", "\n".join(re.findall(r"^features:.*$", text, re.MULTILINE))))
    found |= set(re.findall(r"^feature_tier\[([\w.-]+)\]: supported$", text, re.MULTILINE))
    sizes = re.search(
        r"^subgroup: size=(\d+).*minSubgroupSize=(\d+) maxSubgroupSize=(\d+)", text, re.MULTILINE
    )
    if sizes is not None:
        size, least, most = map(int, sizes.groups())
        control = "subgroupSizeControl" in found
        found |= {
            f"subgroupSize{n}"
            for n in (4, 8, 16, 32, 64, 128)
            if n == size or (control and least <= n <= most)
        }
    return frozenset(found)


@cache
def device_features(path: str) -> frozenset[str]:
    """Returns the features of a Vulkan device of this machine, or nothing where they cannot be told.

    Args:
        path: the driver's name of the device; empty for the one that IREE takes, the first.
    """
    try:
        driver = rt.get_driver("vulkan")
        for entry in driver.query_available_devices():
            if path in ("", str(entry["path"])):
                return parse_device_info(str(driver.dump_device_info(entry["device_id"])))
    except IREE_ERRORS:
        pass
    return frozenset()
