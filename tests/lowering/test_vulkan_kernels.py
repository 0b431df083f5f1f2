"""The kernels for Vulkan on the cases of the CPU's, against the same numpy twins: near them, and each row by itself."""

from __future__ import annotations

import numpy as np
import pytest
import test_moe_kernels as experts
from kernel_cases import CASES, activations, expected, rows_of
from layer_bundles import call_layer, compile_layers, compile_program
from moe_twin import moe
from vulkan_device import far_rows, no_vulkan, same_values

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
    case, x = CASES[name], activations(name)
    alone: dict[int, np.ndarray] = {}
    for rows in rows_of(case):
        got = call_layer(kernels, name, x[:rows])
        digits = case.few if rows < case.min_tokens else case.digits
        want = expected(name, digits)[:rows]
        far = far_rows(got, want)
        assert not far, f"{rows} rows, wrong {far}"
        for row in range(rows):  # few rows and tiles of rows add the same values in the same order
            before = alone.setdefault((row, digits), got[row])
            assert same_values(got[row], before), f"row {row} of {rows}"


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if no_vulkan():
        pytest.skip(no_vulkan())
    target, layers = VulkanTarget.named(), []
    for case in experts.CASES:
        kernels = case.kernels(THREADS, target)
        group = target.pack_experts(case.name, kernels, case.source())
        inputs = (((case.hidden,), case.io), ((case.slots,), "i64"), ((case.slots,), "f32"))
        layers.append((case.name, kernels, group, inputs, ((case.hidden,), case.io)))
    return compile_program(tmp_path_factory.mktemp("vulkan") / "experts", layers, target, "vulkan")


@pytest.mark.parametrize("case", experts.CASES, ids=lambda case: case.name)
def test_experts_are_near_the_twin(routed: Bundle, case: experts.Case) -> None:
    for tokens in experts.TOKENS:
        x, ids, weights = experts.routed(case, tokens)
        got = call_layer(routed, case.name, x, ids, weights)
        far = far_rows(got, moe(x, ids, weights, case.experts, case.digits))
        assert not far, f"{tokens} tokens, wrong {far}"
        if tokens == 33:
            part = slice(20, 21)
            alone = call_layer(routed, case.name, x[part], ids[part], weights[part])
            assert same_values(alone, got[part])
