"""What kernels of all GPUs have to do: be near the numpy twin, each row by itself. Both tell whether they equal it."""

from __future__ import annotations

import numpy as np
from foreign_cpu import AnyBundle
from fused_twin import fused_linear
from kernel_cases import CASES, GPU_ROWS, activations, expected, rows_of
from layer_bundles import call_layer
from numpy_twin import same_bits
from test_fused_kernels import CASES as FUSED
from test_fused_kernels import call_fused, given
from test_moe_kernels import Case, routed
from test_moe_kernels import expected as expected_experts
from vulkan_device import far_rows, same_values

# One case of every mode.
WITH_MANY_TOKENS = ("int8", "planes2", "planes3", "e4m3", "w8")


def check_linear(bundle: AnyBundle, name: str) -> bool:
    """Few rows and tiles of rows add the same values in the same order."""
    case, x, equal = CASES[name], activations(name), True
    alone: dict[int, np.ndarray] = {}
    for rows in rows_of(case, GPU_ROWS):
        got = call_layer(bundle, name, x[:rows])
        digits = case.few if rows < case.min_tokens else case.digits
        want = expected(name, digits)[:rows]
        far = far_rows(got, want)
        assert not far, f"{rows} rows, wrong {far}"
        equal &= same_bits(got, want)
        before = alone.get(digits, got[:0])
        assert same_values(got[: len(before)], before), f"{rows} rows, other values than {len(before)} rows"
        alone[digits] = got
    return equal


def check_fused(bundle: AnyBundle, name: str, counts: tuple[int, ...] = (0, 1, 4, 5, 17, 70)) -> bool:
    """Without fused multiply-adds a norm differs by a rounding, which moves codes that lie between two."""
    fused, equal = FUSED[name], True
    case, around = fused.case, fused.around
    x, residual = given(name, max(counts))
    fuses = (True, False) if around.norm is not None else (True,)
    wanted = {
        digits: [fused_linear(x, case.weight, digits, around, residual, how) for how in fuses]
        for digits in {case.digits, case.few}
    }
    alone: dict[int, np.ndarray] = {}
    for rows in counts:
        got, digits = call_fused(bundle, name, x[:rows], residual), case.digits
        if rows < case.min_tokens:
            digits = case.few
        # A product's gate and up are near to what is largest of them.
        far = [far_rows(got, want[:rows], 4e-6 if around.glu else None) for want in wanted[digits]]
        assert [] in far, f"{rows} rows, wrong {far}"
        equal &= same_bits(got, wanted[digits][0][:rows])
        before = alone.get(digits, got[:0])
        assert same_values(got[: len(before)], before), f"{rows} rows, other values than {len(before)} rows"
        alone[digits] = got
    return equal


def check_experts(bundle: AnyBundle, case: Case) -> bool:
    equal = True
    for tokens in (0, 1, 2, 17, 129, 513) if case.name in WITH_MANY_TOKENS else (0, 1, 2, 17, 129):
        x, ids, weights = routed(case, tokens)
        got = call_layer(bundle, case.name, x, ids, weights)
        want = expected_experts(case.name, tokens)
        far = far_rows(got, want)
        assert not far, f"{tokens} tokens, wrong {far}"
        equal &= same_bits(got, want)
        if tokens == 129:
            part = slice(20, 21)
            alone = call_layer(bundle, case.name, x[part], ids[part], weights[part])
            assert same_values(alone, got[part])
    return equal
