"""torch.ops.halfbyte.linear against its numpy twin, bit for bit, and against plain arithmetic."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy_twin import TYPES, Weight, linear, same_bits, same_by_row
from random_layers import KINDS, random_activations, random_weight, telling_rows
from torch_bridge import array, linear_arguments, operator_linear, tensor

MODES = (("int8", 3), ("none", 2), ("none", 3))
# N, K, group: group sizes from 8 to 1024, one that is no power of two, a ragged last group, channelwise, odd K.
SHAPES = (
    *((5, 96, 8), (6, 64, 16), (7, 96, 32), (12, 192, 64), (8, 192, 96), (9, 256, 128), (3, 1024, 256)),
    *((4, 2048, 1024), (40, 192, 128), (20, 520, 256), (6, 136, 24), (16, 132, 132), (5, 35, 35), (8, 8, 8)),
)


def planes(activations: str, digits: int) -> int:
    return 1 if activations == "int8" else digits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("activations", "digits"), MODES)
def test_equals_the_twin_for_every_shape(kind: str, activations: str, digits: int) -> None:
    for seed, (outputs, inputs, group_size) in enumerate(SHAPES):
        weight = random_weight(seed, outputs, inputs, group_size, kind, bias=seed % 2 == 0)
        x = random_activations(seed, 5, inputs)
        got = operator_linear(x, weight, activations, digits)
        want = linear(x, weight, planes(activations, digits))
        assert same_bits(got, want), (outputs, inputs, group_size, same_by_row(got, want))


@pytest.mark.parametrize("io", TYPES)
@pytest.mark.parametrize("scale", TYPES)
def test_equals_the_twin_for_every_dtype(io: str, scale: str) -> None:
    for kind in KINDS:
        weight = random_weight(7, 11, 80, 32, kind, scale, bias=True)
        x = np.concatenate([random_activations(8, 4, 80, io), telling_rows(80, io)])
        for activations, digits in MODES:
            got = operator_linear(x, weight, activations, digits)
            want = linear(x, weight, planes(activations, digits))
            assert got.dtype == TYPES[io]
            assert same_bits(got, want), (kind, activations, digits, same_by_row(got, want))


@pytest.mark.parametrize(("activations", "digits"), MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_give_exactly_the_bias_and_bad_rows_touch_no_other(
    kind: str, activations: str, digits: int
) -> None:
    weight = random_weight(3, 9, 96, 32, kind, bias=True)
    x = telling_rows(96)
    bad = [4, 5, 6]
    got = operator_linear(x, weight, activations, digits)
    np.testing.assert_array_equal(got[0], weight.bias)
    np.testing.assert_array_equal(got[1], weight.bias)
    assert np.isnan(got[bad]).all()
    assert np.isfinite(np.delete(got, bad, 0)).all()
    assert same_bits(
        np.delete(got, bad, 0), operator_linear(np.delete(x, bad, 0), weight, activations, digits)
    )


@pytest.mark.parametrize("io", TYPES)
@pytest.mark.parametrize(("activations", "digits"), MODES)
def test_a_row_of_a_batch_equals_the_row_alone(io: str, activations: str, digits: int) -> None:
    """Case 67: what one token holds changes no bit of another's result."""
    weight = random_weight(4, 10, 72, 24, bias=True)
    x = random_activations(5, 3, 72).astype(np.float64) * [[1], [100], [0.01]]
    x = x.astype(TYPES[io])
    together = operator_linear(x, weight, activations, digits)
    alone = np.concatenate(
        [operator_linear(x[row : row + 1], weight, activations, digits) for row in range(3)]
    )
    assert same_bits(together, alone)
    x[1] = -x[1] * 2
    changed = operator_linear(x, weight, activations, digits)
    assert same_bits(changed[[0, 2]], together[[0, 2]])
    assert not same_bits(changed[1], together[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("activations", "digits"), MODES)
def test_errors_are_half_a_step_of_the_activations(kind: str, activations: str, digits: int) -> None:
    """Against exact arithmetic; a step is 1/127 of a token's largest input, or 2^-13 or 2^-21 of a block's."""
    outputs, inputs, group_size = 33, 512, 64
    weight = random_weight(6, outputs, inputs, group_size, kind, bias=True)
    x = random_activations(7, 6, inputs)
    blocks = np.abs(x.astype(np.float64)).reshape(6, -1, group_size)
    if activations == "int8":
        step = np.broadcast_to(blocks.max((1, 2))[:, None] / 127, (6, inputs // group_size))
    else:
        step = np.exp2(np.floor(np.log2(blocks.max(2))) - (8 * digits - 3))
    exact = x.astype(np.float64) @ weight.dequantized().T + weight.bias
    by_group = np.abs(weight.dequantized()).reshape(outputs, -1, group_size).sum(2)
    # The float32 sum loses a little of the largest partial sum, in which a minimum's part is counted by itself.
    scale = np.abs(weight.scale.astype(np.float64)).repeat(group_size, 1) * 15
    minimum = 0 if weight.minimum is None else np.abs(weight.minimum.astype(np.float64)).repeat(group_size, 1)
    rounding = 2e-7 * (np.abs(x.astype(np.float64)) @ (scale + minimum).T)
    error = np.abs(operator_linear(x, weight, activations, digits) - exact)
    assert (error <= 0.5 * step @ by_group.T + rounding).all()
    assert error.max() > 0


@pytest.mark.parametrize("group_size", [8, 16, 32, 64, 128, 256, 512, 1024, 2048])
def test_one_value_everywhere(group_size: int) -> None:
    """Case 37: codes 2, zero 3, scale 0.5, x of ones."""
    groups = 2048 // group_size
    weight = Weight(
        np.full((4, 2048), 2, np.uint8),
        np.full((4, groups), 0.5, np.float32),
        group_size,
        np.full((4, groups), 3, np.uint8),
    )
    x = np.ones((2, 2048), np.float32)
    for activations, digits in MODES:
        np.testing.assert_allclose(operator_linear(x, weight, activations, digits), -1024.0, rtol=1e-6)


@pytest.mark.parametrize(("activations", "digits"), MODES)
def test_nothing_overflows_with_131072_inputs_and_one_scale(activations: str, digits: int) -> None:
    inputs = 131072
    for kind, code in (("symmetric", 0), ("integer", 15), ("minimum", 15)):
        weight = random_weight(1, 2, inputs, inputs, kind)
        weight = replace(
            weight,
            codes=np.full((2, inputs), code, np.uint8),
            zero=None if weight.zero is None else np.zeros((2, 1), np.uint8),
        )
        x = np.full((2, inputs), -1.999, np.float32)
        x[1] = 1.999
        got = operator_linear(x, weight, activations, digits)
        exact = x.astype(np.float64) @ weight.dequantized().T
        assert np.abs(got / exact - 1).max() < (2e-2 if activations == "int8" else 2e-5)
        assert same_bits(got, linear(x, weight, planes(activations, digits)))


def test_outputs_beyond_a_narrow_type_overflow_only_at_the_last_cast() -> None:
    """Cases 43 and 44: y = 65536 and 70000 pass through no float16."""
    weight = Weight(np.full((2, 8192), 9, np.uint8), np.full((2, 64), 1.0, np.float16), 128)
    for activations, digits in MODES:
        for io, wanted in (("f32", 65536.0), ("bf16", 65536.0), ("f16", np.inf)):
            got = operator_linear(np.full((1, 8192), 8, TYPES[io]), weight, activations, digits)
            np.testing.assert_allclose(got.astype(np.float32), wanted, rtol=1e-3)
        bias = replace(weight, bias=np.array([-60000.0, 4464.0], np.float32))
        got = operator_linear(np.full((1, 8192), 8, np.float16), bias, activations, digits)
        np.testing.assert_allclose(got.astype(np.float32), [[5536.0, np.inf]], rtol=1e-3)
        wide = operator_linear(np.full((1, 8192), 8, ml_dtypes.bfloat16), bias, activations, digits)
        np.testing.assert_allclose(wide.astype(np.float32), [[5536.0, 70000.0]], rtol=4e-3)


@pytest.mark.parametrize("largest", [1e30, 3.3e38])
def test_huge_inputs(largest: float) -> None:
    weight = random_weight(2, 7, 64, 16)
    weight = replace(weight, scale=(weight.scale * np.float32(1e-4)).astype(np.float32))
    x = random_activations(3, 4, 64)
    x = (x / np.abs(x).max(1, keepdims=True) * largest).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for activations, digits in MODES:
            got = operator_linear(x, weight, activations, digits)
            assert same_bits(got, linear(x, weight, planes(activations, digits)))
            if largest == 1e30 or activations == "int8":
                exact = x.astype(np.float64) @ weight.dequantized().T
                assert np.abs(got - exact).max() <= 2e-2 * np.abs(exact).max()


@pytest.mark.parametrize("shape", [(40,), (1, 40), (3, 40), (2, 3, 40), (2, 1, 3, 40), (0, 40), (2, 0, 40)])
@pytest.mark.parametrize(("activations", "digits"), MODES)
def test_leading_dimensions(shape: tuple[int, ...], activations: str, digits: int) -> None:
    """Cases 84 and 97: no rows, one row without a dimension of its own, rows in several dimensions."""
    weight = random_weight(9, 6, 40, 8, bias=True)
    x = random_activations(1, max(1, int(np.prod(shape[:-1]))), 40)[: int(np.prod(shape[:-1]))].reshape(shape)
    got = operator_linear(x, weight, activations, digits)
    assert got.shape == (*shape[:-1], 6)
    flat = linear(x.reshape(-1, 40), weight, planes(activations, digits))
    assert same_bits(got.reshape(-1, 6), flat)


def test_min_tokens_chooses_by_the_number_of_rows() -> None:
    weight = random_weight(5, 6, 64, 16)
    x = random_activations(2, 8, 64)
    few, many = linear(x, weight, 3), linear(x, weight, 1)
    assert not same_bits(few, many)
    for rows in (0, 1, 2, 3, 4, 5, 8):
        got = operator_linear(x[:rows], weight, "int8", 3, min_tokens=4)
        assert same_bits(got, (few if rows < 4 else many)[:rows]), rows
    assert same_bits(operator_linear(x, weight, "int8", 2, min_tokens=9), linear(x, weight, 2))
    assert same_bits(operator_linear(x, weight, "none", 3, min_tokens=4), few)
    three_by_two = operator_linear(x[:6].reshape(3, 2, 64), weight, "int8", 3, min_tokens=4)
    assert same_bits(three_by_two.reshape(6, 6), many[:6])


def test_a_row_that_is_not_contiguous() -> None:
    weight = random_weight(5, 6, 64, 16)
    x = random_activations(2, 8, 128)
    arguments = linear_arguments(x[:, ::2], weight, "int8")
    whole = tensor(x)
    assert whole is not None
    got = array(torch.ops.halfbyte.linear(whole[:, ::2], *arguments[1:]))
    assert same_bits(got, linear(np.ascontiguousarray(x[:, ::2]), weight, 1))
