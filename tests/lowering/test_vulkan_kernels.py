"""The kernels for Vulkan on the cases of the CPU's, against the same numpy twins: near them, and each row by itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import test_moe_kernels as experts
from gpu_checks import check_experts, check_linear
from kernel_cases import CASES
from layer_bundles import compile_layers
from vulkan_device import no_vulkan

from halfbyte.lowering.kernels.isa import THREADS
from halfbyte.lowering.targets.vulkan import VulkanTarget
from halfbyte.runtime import Bundle

# Without the dot product only its replacement differs.
WITHOUT_DOT = tuple(CASES)[::6]


def compiled(names: Iterable[str], device: str, folder: Path) -> Bundle:
    if no_vulkan():
        pytest.skip(no_vulkan())
    chosen = [CASES[name] for name in names]
    return compile_layers(folder / device, chosen, THREADS, VulkanTarget.named(device), "vulkan")


# Two fixtures: one whose parameter is given together with the names would be made again for every test.
@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return compiled(CASES, "portable", tmp_path_factory.mktemp("vulkan"))


@pytest.fixture(scope="module")
def without_dot(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return compiled(WITHOUT_DOT, "portable-nodot", tmp_path_factory.mktemp("vulkan"))


@pytest.mark.parametrize("name", CASES)
def test_is_near_the_twin(kernels: Bundle, name: str) -> None:
    """Group sums are exact; only float32 sums may be rounded otherwise, where a device has no fused multiply-add."""
    check_linear(kernels, name)


@pytest.mark.parametrize("name", WITHOUT_DOT)
def test_is_near_the_twin_without_the_dot_product(without_dot: Bundle, name: str) -> None:
    check_linear(without_dot, name)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if no_vulkan():
        pytest.skip(no_vulkan())
    folder = tmp_path_factory.mktemp("vulkan") / "experts"
    return experts.compile_experts(folder, experts.CASES, THREADS, VulkanTarget.named(), "vulkan")


@pytest.mark.parametrize("case", experts.CASES, ids=lambda case: case.name)
def test_experts_are_near_the_twin(routed: Bundle, case: experts.Case) -> None:
    check_experts(routed, case)
