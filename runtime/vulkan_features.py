"""What a Vulkan device can do, as IREE's driver tells it, to compare with what a program needs."""

from __future__ import annotations

import re

from halfbyte.runtime.device_info import device_info

_COMPUTE = 0x20  # of the stages that may ask for a size


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
        r"^subgroup: size=(\d+).*minSubgroupSize=(\d+) maxSubgroupSize=(\d+) requiredSubgroupSizeStages=(\w+)",
        text,
        re.MULTILINE,
    )
    if sizes is not None:
        size, least, most = map(int, sizes.groups()[:3])
        control = "subgroupSizeControl" in found and int(sizes[4], 16) & _COMPUTE
        found |= {
            f"subgroupSize{n}"
            for n in (4, 8, 16, 32, 64, 128)
            if n == size or (control and least <= n <= most)
        }
    return frozenset(found)


def device_features(path: str) -> frozenset[str]:
    """Returns the features of a Vulkan device of this machine, or nothing where they cannot be told.

    Args:
        path: the driver's name of the device; empty for the one that IREE takes, the first.
    """
    return parse_device_info(device_info("vulkan", path))
