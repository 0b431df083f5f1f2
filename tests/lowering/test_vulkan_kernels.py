"""The kernels for Vulkan on the cases of the CPU's, against the same numpy twins: near them, and each row by itself."""

from __future__ import annotations

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
NAMES = {"portable": tuple(CASES), "portable-nodot": tuple(CASES)[::6]}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if no_vulkan():
        pytest.skip(no_vulkan())
    target = VulkanTarget.named(request.param)
    chosen = [CASES[name] for name in NAMES[request.param]]
    return compile_layers(tmp_path_factory.mktemp("vulkan") / "dense", chosen, THREADS, target, "vulkan")


@pytest.mark.parametrize(
    ("kernels", "name"), [(t, name) for t in NAMES for name in NAMES[t]], indirect=["kernels"]
)
def test_is_near_the_twin(kernels: Bundle, name: str) -> None:
    """Group sums are exact; only float32 sums may be rounded otherwise, where a device has no fused multiply-add."""
    check_linear(kernels, name)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if no_vulkan():
        pytest.skip(no_vulkan())
    folder = tmp_path_factory.mktemp("vulkan") / "experts"
    return experts.compile_experts(folder, experts.CASES, THREADS, VulkanTarget.named(), "vulkan")


@pytest.mark.parametrize("case", experts.CASES, ids=lambda case: case.name)
def test_experts_are_near_the_twin(routed: Bundle, case: experts.Case) -> None:
    check_experts(routed, case)
