"""torch.ops.halfbyte.quantize_per_token: int8, one scale per token, half to even."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy_twin import TYPES, quantized_per_token, same_bits
from random_layers import random_activations, telling_rows
from torch_bridge import array, tensor


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes, scale = torch.ops.halfbyte.quantize_per_token(tensor(x))
    assert codes.dtype is torch.int8 and scale.dtype is torch.float32
    return array(codes), array(scale)


@pytest.mark.parametrize("io", TYPES)
@pytest.mark.parametrize("inputs", [1, 7, 64, 1000])
def test_equals_the_twin(io: str, inputs: int) -> None:
    rows = [random_activations(inputs, 50, inputs, io)]
    if inputs > 1:
        rows.append(telling_rows(inputs, io))
    x = np.concatenate(rows)
    codes, scale = quantize(x)
    want_codes, want_scale = quantized_per_token(x)
    np.testing.assert_array_equal(codes, want_codes)
    assert same_bits(scale, want_scale)


def test_ten_thousand_rows_of_bfloat16() -> None:
    """Case 26: scales in float32 from bfloat16 inputs, code for code."""
    x = np.random.default_rng(0).normal(size=(10000, 24)).astype(TYPES["bf16"])
    codes, scale = quantize(x)
    want_codes, want_scale = quantized_per_token(x)
    np.testing.assert_array_equal(codes, want_codes)
    assert same_bits(scale, want_scale)


def test_halves_go_to_even_and_the_divisor_is_127() -> None:
    """Case 16: [-1, 1] is [-127, 127]; the scale is absmax / 127 and there is no zero point."""
    codes, scale = quantize(np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], np.float32))
    np.testing.assert_array_equal(codes, [[127, 0, 2, 2, 0, -2, -2, 126]])
    assert scale[0] == 1
    codes, scale = quantize(np.array([[-1.0, 1.0], [-3.0, 1.0]], np.float32))
    np.testing.assert_array_equal(codes, [[-127, 127], [-127, 42]])
    assert same_bits(scale, np.array([1, 3], np.float32) / np.float32(127))


def test_bad_rows_and_zero_rows() -> None:
    x = np.array([[1, 2], [np.nan, 2], [1, np.inf], [-np.inf, np.nan], [0, -0.0], [3, 4]], np.float32)
    codes, scale = quantize(x)
    np.testing.assert_array_equal(codes, [[64, 127], [0, 0], [0, 0], [0, 0], [0, 0], [95, 127]])
    np.testing.assert_array_equal(np.isnan(scale), [False, True, True, True, False, False])
    assert scale[4] == 0


@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 3, 6), (2, 0, 6)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    x = random_activations(3, 6, 6).reshape(-1)[: int(np.prod(shape))].reshape(shape)
    codes, scale = quantize(x)
    assert codes.shape == shape and scale.shape == shape[:-1]
    want_codes, want_scale = quantized_per_token(x.reshape(-1, 6))
    np.testing.assert_array_equal(codes.reshape(-1, 6), want_codes)
    assert same_bits(scale.reshape(-1), want_scale)


def test_subnormal_inputs_count_as_zero() -> None:
    codes, scale = quantize(np.array([[1e-39, -1e-39], [2.0**-126, 1e-39]], np.float32))
    np.testing.assert_array_equal(codes, [[0, 0], [0, 0]])
    assert (scale == 0).all()
