"""e4m3: the operators that quantize to it and multiply with it, against numpy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from fp8_twin import fp8_block_linear, operator, random_fp8_weight
from numpy_twin import TYPES, e4m3_per_token, same_bits, same_by_row
from random_layers import random_activations, telling_rows
from torch_bridge import array, tensor

from halfbyte.passes.ops.quantize_fp8 import quantize_fp8, round_e4m3

# N, K, block of outputs and inputs (0: all of them).
CASES = (
    *((128, 256, (128, 128)), (200, 320, (128, 128)), (72, 130, (1, 0)), (40, 96, (0, 0))),
    *((9, 1000, (128, 128)), (5, 1000, (1, 0)), (64, 640, (64, 320)), (3, 5, (128, 128))),
)


def test_every_e4m3_value_and_every_midpoint_rounds_as_ml_dtypes_does() -> None:
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    middle = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, middle, np.nextafter(middle, np.float32(0)), np.linspace(-448, 448, 9999)])
    x = x.astype(np.float32)
    want = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(round_e4m3(torch.from_numpy(x)).numpy(), want)


def test_saturates() -> None:
    x = torch.tensor([448.0, 460.0, 1e9, -1e9, 2.0**-10, 1.5 * 2.0**-10, -(2.0**-11)])
    assert round_e4m3(x).tolist() == [448, 448, 448, -448, 0, 2.0**-9, 0]


@pytest.mark.parametrize("io", TYPES)
@pytest.mark.parametrize("inputs", [1, 7, 64, 1000])
def test_per_token_equals_the_twin(io: str, inputs: int) -> None:
    x = random_activations(inputs, 40, inputs, io)
    if inputs > 1:
        x = np.concatenate([x, telling_rows(inputs, io)])
    given = tensor(x)
    assert given is not None
    values, scale = quantize_fp8(given)
    want, want_scale = e4m3_per_token(x)
    np.testing.assert_array_equal(values.numpy() * 512, want)
    assert same_bits(scale.numpy(), want_scale)


@pytest.mark.parametrize("activations", ["fp8", "none"])
@pytest.mark.parametrize(("outputs", "inputs", "block"), CASES)
def test_linear_equals_the_twin(outputs: int, inputs: int, block: tuple[int, int], activations: str) -> None:
    weight = random_fp8_weight(outputs, outputs, inputs, block, bias=outputs % 2 == 0)
    for io in TYPES:
        x = random_activations(outputs, 6, inputs, io)
        got, want = array(operator(x, weight, activations)), fp8_block_linear(x, weight, activations == "fp8")
        assert got.dtype == want.dtype
        if activations == "fp8":
            assert same_bits(got, want), same_by_row(got, want)
        else:  # float64 sums of float32 products may be off by their last bit
            close = np.abs(got.astype(np.float64) - want.astype(np.float64))
            assert (close <= 1e-6 * np.abs(want).max(-1, keepdims=True)).all() or io != "f32"


def test_linear_is_near_plain_arithmetic() -> None:
    weight = random_fp8_weight(0, 96, 384, (64, 128), bias=True)
    assert weight.bias is not None
    x = random_activations(3, 5, 384)
    scale = np.repeat(np.repeat(weight.scale, 64, 0)[:96], 128, 1).astype(np.float64)
    want = x.astype(np.float64) @ (weight.values * scale).T + weight.bias
    largest = np.abs(want).max(-1, keepdims=True)
    assert (np.abs(array(operator(x, weight, "none")) - want) <= 1e-5 * largest).all()
    assert (np.abs(array(operator(x, weight, "fp8")) - want) <= 8e-2 * largest).all()


@pytest.mark.parametrize("activations", ["fp8", "none"])
def test_bad_rows_touch_no_other(activations: str) -> None:
    weight = random_fp8_weight(1, 20, 96, (20, 48), bias=True)
    x = telling_rows(96)
    got, bad = array(operator(x, weight, activations)), [4, 5, 6]
    assert same_bits(got[0], weight.bias) and same_bits(got[1], weight.bias)
    assert np.isnan(got[4]).any() and not np.isfinite(got[bad]).all(-1).any()
    rest = np.delete(x, bad, 0)
    assert same_bits(np.delete(got, bad, 0), array(operator(rest, weight, activations)))
    alone = [array(operator(row[None], weight, activations)) for row in rest]
    assert same_bits(array(operator(rest, weight, activations)), np.concatenate(alone))


@pytest.mark.parametrize("shape", [(96,), (0, 96), (2, 3, 96)])
def test_is_a_proper_operator(shape: tuple[int, ...]) -> None:
    weight = random_fp8_weight(1, 20, 96, (20, 48), bias=False)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    arguments = (x, *weight.arguments("fp8"))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.halfbyte.fp8_block_linear.default, arguments, test_utils=checks)
    assert torch.ops.halfbyte.fp8_block_linear(*arguments).shape == (*shape[:-1], 20)
