"""Digit planes: float activations as base-256 digits under a power of two."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_twin import TYPES, digits_of, same_bits, widest_block
from random_layers import random_activations, telling_rows
from torch_bridge import array, tensor

from halfbyte.passes.ops import digit_block, digit_planes


def cut(x: np.ndarray, digits: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    value = tensor(x)
    assert value is not None
    planes, scale = digit_planes(value, digits, block)
    return array(planes), array(scale)


@pytest.mark.parametrize("io", TYPES)
@pytest.mark.parametrize("digits", [2, 3])
@pytest.mark.parametrize(("inputs", "block"), [(64, 16), (100, 32), (128, 128), (5, 8), (200, 128)])
def test_equals_the_twin(io: str, digits: int, inputs: int, block: int) -> None:
    x = np.concatenate([random_activations(1, 6, inputs, io), telling_rows(inputs, io)])
    planes, scale = cut(x, digits, block)
    assert planes.shape == (len(x), digits, inputs)
    assert scale.shape == (len(x), -(-inputs // block))
    for row in range(len(x)):
        for index, start in enumerate(range(0, inputs, block)):
            want, unit = digits_of(x[row, start : start + block], digits)
            np.testing.assert_array_equal(planes[row, :, start : start + block], want)
            assert same_bits(scale[row, index : index + 1], np.array([unit]))


@pytest.mark.parametrize("digits", [2, 3])
def test_digits_are_bytes_that_add_up(digits: int) -> None:
    x = random_activations(2, 20, 96) * np.float32(1e3)
    planes, scale = cut(x, digits, 32)
    assert planes.min() >= -128 and planes.max() <= 127
    weights = 256.0 ** np.arange(digits)
    whole = (planes * weights[:, None]).sum(1)
    assert np.abs(whole).max() <= 2 ** (8 * digits - 2)
    back = whole.reshape(20, 3, 32) * scale[:, :, None].astype(np.float64)
    steps = np.abs(back - x.reshape(20, 3, 32)) / scale[:, :, None]
    assert steps.max() <= 0.5
    mantissa, _ = np.frexp(scale)
    assert (mantissa == 0.5).all()


@pytest.mark.parametrize(("digits", "binades"), [(2, 7), (3, 15)])
def test_bfloat16_is_held_exactly_within_its_binades(digits: int, binades: int) -> None:
    exponents = -np.arange(binades, dtype=np.float64)
    x = np.concatenate([[1.9921875], 1.9921875 * 2.0**exponents, -1.0078125 * 2.0**exponents])
    x = x.astype(TYPES["bf16"])[None]
    planes, scale = cut(x, digits, 8 * len(x[0]))
    back = (planes[0] * 256.0 ** np.arange(digits)[:, None]).sum(0) * float(scale[0, 0])
    np.testing.assert_array_equal(back, x[0].astype(np.float64))


def test_a_bad_block_spoils_only_its_own_scale() -> None:
    x = np.ones((1, 24), np.float32)
    x[0, 9], x[0, 20] = np.nan, -np.inf
    planes, scale = cut(x, 3, 8)
    np.testing.assert_array_equal(np.isnan(scale), [[False, True, True]])
    assert (planes[0, :, 8:] == 0).all()
    assert (planes[0, 2, :8] == 32).all()


@pytest.mark.parametrize("digits", [2, 3])
def test_zeros_and_the_smallest_blocks_have_normal_scales(digits: int) -> None:
    x = np.zeros((3, 8), np.float32)
    x[1], x[2] = 2.0**-126, -(2.0**-100)
    planes, scale = cut(x, digits, 8)
    assert (planes[0] == 0).all()
    assert (scale >= 2.0**-126).all()
    whole = (planes * 256.0 ** np.arange(digits)[:, None]).sum(1)
    assert whole[2, 0] == -(2.0 ** (8 * digits - 3 - 5))


@pytest.mark.parametrize("group_size", [*range(8, 264, 8), 512, 520, 1000, 1024, 2048, 4096])
def test_blocks_divide_groups(group_size: int) -> None:
    block = digit_block(group_size, 8192)
    assert block == widest_block(group_size, 8192)
    assert group_size % block == 0 and block % 8 == 0 and block <= 128


@pytest.mark.parametrize(("inputs", "block"), [(4096, 128), (128, 128), (100, 104), (35, 40), (8, 8), (3, 8)])
def test_blocks_of_channelwise_weights(inputs: int, block: int) -> None:
    assert digit_block(inputs, inputs) == block
    assert digit_block(10 * inputs, inputs) == block
