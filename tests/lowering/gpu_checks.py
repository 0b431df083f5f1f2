"""What kernels of all GPUs have to do: be near the numpy twin, each row by itself. Both tell whether they equal it."""

from __future__ import annotations

import numpy as np
from foreign_cpu import AnyBundle
from fused_twin import fused_linear
from kernel_cases import CASES, activations, expected, rows_of
from layer_bundles import call_layer
from moe_twin import moe
from numpy_twin import same_bits
from test_fused_kernels import CASES as FUSED
from test_fused_kernels import call_fused, given
from test_moe_kernels import TOKENS, Case, routed
from vulkan_device import far_rows, same_values


def check_linear(bundle: AnyBundle, name: str) -> bool:
    """Few rows and tiles of rows add the same values in the same order."""
    case, x, equal = CASES[name], activations(name), True
    alone: dict[tuple[int, int], np.ndarray] = {}
    for rows in rows_of(case):
        got = call_layer(bundle, name, x[:rows])
        digits = case.few if rows < case.min_tokens else case.digits
        want = expected(name, digits)[:rows]
        far = far_rows(got, want)
        assert not far, f"{rows} rows, wrong {far}"
        equal &= same_bits(got, want)
        for row in range(rows):
            before = alone.setdefault((row, digits), got[row])
            assert same_values(got[row], before), f"row {row} of {rows}"
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
    alone: dict[tuple[int, int], np.ndarray] = {}
    for rows in counts:
        got, digits = call_fused(bundle, name, x[:rows], residual), case.digits
        if rows < case.min_tokens:
            digits = case.few
        # A product's gate and up are near to what is largest of them.
        far = [far_rows(got, want[:rows], 4e-6 if around.glu else None) for want in wanted[digits]]
        assert [] in far, f"{rows} rows, wrong {far}"
        equal &= same_bits(got, wanted[digits][0][:rows])
        for row in range(rows):
            before = alone.setdefault((row, digits), got[row])
            assert same_values(got[row], before), f"row {row} of {rows}"
    return equal


def check_experts(bundle: AnyBundle, case: Case) -> bool:
    equal = True
    for tokens in TOKENS:
        x, ids, weights = routed(case, tokens)
        got = call_layer(bundle, case.name, x, ids, weights)
        want = moe(x, ids, weights, case.experts, case.digits)
        far = far_rows(got, want)
        assert not far, f"{tokens} tokens, wrong {far}"
        equal &= same_bits(got, want)
        if tokens == 33:
            part = slice(20, 21)
            alone = call_layer(bundle, case.name, x[part], ids[part], weights[part])
            assert same_values(alone, got[part])
    return equal
