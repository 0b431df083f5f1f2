"""The kernels for CUDA on a device, against the same numpy twins as the CPU's.

Attention, e4m3 experts, operators in graphs, topk and norms are run there by their own tests, as ``[cuda]``. Properties
of the report say whether results also equal the twin bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_fused_kernels as fused
import test_moe_kernels as experts
from gpu_checks import check_experts, check_fused, check_linear
from kernel_cases import CASES
from layer_bundles import compile_layers
from vulkan_device import no_device

from halfbyte.lowering.targets.cuda import CudaTarget
from halfbyte.runtime import Bundle, cuda_features

TARGET = CudaTarget.named("sm_80")
Record = Callable[[str, object], None]


def no_cuda() -> str:
    """Why this machine cannot run the programs, or nothing."""
    needed = cuda_features.needed(TARGET.architecture, TARGET.runs_on["features"])
    return no_device("cuda") or ", ".join(cuda_features.device_features("").lacks(needed))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if no_cuda():
        pytest.skip(no_cuda())
    folder = tmp_path_factory.mktemp("cuda") / "dense"
    return compile_layers(folder, CASES.values(), TARGET.isa, TARGET, "cuda")


@pytest.mark.parametrize("name", CASES)
def test_is_near_the_twin(kernels: Bundle, name: str, record_property: Record) -> None:
    record_property("equal", check_linear(kernels, name))


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if no_cuda():
        pytest.skip(no_cuda())
    folder = tmp_path_factory.mktemp("cuda") / "fused"
    return fused.compile_fused(folder, fused.CASES, TARGET.isa, TARGET, "cuda")


@pytest.mark.parametrize("name", fused.CASES)
def test_fused_is_near_the_twin(joined: Bundle, name: str, record_property: Record) -> None:
    record_property("equal", check_fused(joined, name))


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if no_cuda():
        pytest.skip(no_cuda())
    folder = tmp_path_factory.mktemp("cuda") / "experts"
    return experts.compile_experts(folder, experts.CASES, TARGET.isa, TARGET, "cuda")


@pytest.mark.parametrize("case", experts.CASES, ids=lambda case: case.name)
def test_experts_are_near_the_twin(routed: Bundle, case: experts.Case, record_property: Record) -> None:
    record_property("equal", check_experts(routed, case))
