"""What kernels of all GPUs have to do: be near the numpy twin, each row by itself. Both tell whether they equal it."""

from __future__ import annotations

import numpy as np
from foreign_cpu import AnyBundle
from kernel_cases import CASES, activations, expected, rows_of
from layer_bundles import call_layer
from moe_twin import moe
from numpy_twin import same_bits
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
