"""The kernels for Vulkan on the cases of the CPU's, against the same numpy twins: near them, and each row by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_fused_kernels as fused
import test_moe_kernels as experts
from gpu_checks import check_experts, check_fused, check_linear
from kernel_cases import CASES
from layer_bundles import compile_layers
from vulkan_device import no_vulkan

from halfbyte.lowering.kernels.isa import THREADS
from halfbyte.lowering.targets.vulkan import VulkanTarget
from halfbyte.runtime import Bundle

PORTABLE = VulkanTarget.named()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if no_vulkan():
        pytest.skip(no_vulkan())
    folder = tmp_path_factory.mktemp("vulkan") / "dense"
    return compile_layers(folder, CASES.values(), THREADS, PORTABLE, "vulkan")


@pytest.mark.parametrize("name", CASES)
def test_is_near_the_twin(kernels: Bundle, name: str) -> None:
    """Group sums are exact; only float32 sums may be rounded otherwise, where a device has no fused multiply-add."""
    check_linear(kernels, name)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if no_vulkan():
        pytest.skip(no_vulkan())
    folder = tmp_path_factory.mktemp("vulkan") / "fused"
    return fused.compile_fused(folder, fused.CASES, THREADS, PORTABLE, "vulkan")


@pytest.mark.parametrize("name", fused.CASES)
def test_fused_is_near_the_twin(joined: Bundle, name: str) -> None:
    check_fused(joined, name)


def test_what_replaces_the_dot_product_is_right(tmp_path: Path) -> None:
    """On devices without it nothing else differs."""
    if no_vulkan():
        pytest.skip(no_vulkan())
    target, names, joined_names = (
        VulkanTarget.named("portable-nodot"),
        tuple(CASES)[::6],
        ("fused0", "fused7"),
    )
    cases = [CASES[name] for name in names]
    dense = compile_layers(tmp_path / "dense", cases, THREADS, target, "vulkan")
    joined = fused.compile_fused(tmp_path / "fused", joined_names, THREADS, target, "vulkan")
    for name in names:
        check_linear(dense, name)
    for name in joined_names:
        check_fused(joined, name)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if no_vulkan():
        pytest.skip(no_vulkan())
    folder = tmp_path_factory.mktemp("vulkan") / "experts"
    return experts.compile_experts(folder, experts.CASES, THREADS, PORTABLE, "vulkan")


@pytest.mark.parametrize("case", experts.CASES, ids=lambda case: case.name)
def test_experts_are_near_the_twin(routed: Bundle, case: experts.Case) -> None:
    check_experts(routed, case)
