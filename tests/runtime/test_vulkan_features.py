"""What IREE's Vulkan driver prints of a device, as names to compare."""

from __future__ import annotations

import pytest

from halfbyte.runtime.vulkan_features import device_features, parse_device_info

INFO = """
name: some GPU
path: GPU-00000000000000000000000000000000
api: 1.3.230
feature_tier[vulkan-1.3]: {tier}
features: storageBuffer8BitAccess=yes shaderInt8=no shaderFloat16=yes subgroupSizeControl={control}
sparse: binding=yes residencyBuffer=yes residencyAliased=yes
subgroup: size=32 operations=0x000000bf quadOperationsInAllStages=yes {sizes}
device_extensions: 1
  VK_KHR_shader_integer_dot_product
"""

OTHERS = {"vulkan-1.3", "storageBuffer8BitAccess", "shaderFloat16", "subgroupSizeControl"}


def info(tier: str = "supported", control: str = "yes", least: int = 32, stages: str = "0x30") -> str:
    sizes = f"minSubgroupSize={least} maxSubgroupSize=64 requiredSubgroupSizeStages=0x000000{stages[2:]}"
    return INFO.format(tier=tier, control=control, sizes=sizes)


def test_features_are_those_that_the_device_has() -> None:
    """Neither extensions nor what stands on other lines (binding=yes) are features."""
    found = parse_device_info(info(control="no"))
    assert found == {"vulkan-1.3", "storageBuffer8BitAccess", "shaderFloat16", "subgroupSize32"}


def test_a_tier_that_lacks_something_is_none() -> None:
    assert "vulkan-1.3" not in parse_device_info(info("missing synchronization2, timelineSemaphore"))


@pytest.mark.parametrize(
    ("control", "least", "stages", "sizes"),
    [
        ("yes", 8, "0x30", {8, 16, 32, 64}),
        ("yes", 32, "0x20", {32, 64}),
        ("no", 8, "0x30", {32}),
        ("yes", 8, "0x10", {32}),  # not for compute shaders
    ],
)
def test_sizes_of_subgroups_that_a_program_may_ask_for(
    control: str, least: int, stages: str, sizes: set[int]
) -> None:
    found = parse_device_info(info(control=control, least=least, stages=stages))
    named = {int(name.removeprefix("subgroupSize")) for name in found - OTHERS}
    assert named == sizes


def test_nothing_is_known_of_what_is_not_there() -> None:
    assert parse_device_info("") == device_features("GPU-none") == frozenset()
