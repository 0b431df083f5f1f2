"""The roundings of activations that PyTorch's tools have: codes, scales and zero points are their operators'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from int8_twin import (
    AFFINE,
    AFFINE_F32,
    AFFINE_F64,
    FIXED,
    KINDS,
    SYMMETRIC,
    column_sums,
    fixed_parameters,
    linear,
    rounded,
)
from numpy_twin import TYPES, Array, same_bits
from random_layers import KINDS as ZEROS
from random_layers import random_activations, random_weight, telling_rows
from torch_bridge import array, linear_arguments, quant_tensor, tensor

from halfbyte.lowering.layout import pack_column_sums
from halfbyte.passes.ops.int8_roundings import int8_rounded
from halfbyte.passes.scheme import Activations

Q: Any = torch.ops.quantized_decomposed


def rows_of(inputs: int, io: str) -> Array:
    """Random rows, those of one sign, constants, ties, zeros, tiny and huge ones."""
    random = np.random.default_rng(inputs)
    largest = 3e38 if io != "f16" else 6e4
    one_sided = random.random((20, inputs)) * np.exp(random.uniform(-6, 6, (20, 1)))
    whole = random.integers(-300, 300, (40, inputs)) / 2
    rows = [
        one_sided,
        -one_sided,
        whole,
        whole * 2.0**-9,
        np.full((1, inputs), 0.7),
        np.full((1, inputs), -3e-3),
    ]
    rows += [random.normal(size=(5, inputs)) * (2.0**-118 if io != "f16" else 2.0**-22)]
    rows += [random.random((3, inputs)) * largest, -random.random((3, inputs)) * largest]
    return np.concatenate(
        [random_activations(inputs, 200, inputs, io), *(part.astype(TYPES[io]) for part in rows)]
    )


def parts(x: Array, kind: str, fixed: Array | None = None) -> tuple[Array, Array, Array]:
    codes, scale, zero = int8_rounded(tensor(x), Activations(kind), tensor(fixed))
    assert codes.dtype is torch.int8 and scale.dtype is zero.dtype is torch.float32
    return array(codes), array(scale), array(zero)


@pytest.mark.parametrize("io", TYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [1, 7, 1000])
def test_equals_the_twin(kind: str, io: str, inputs: int) -> None:
    x = np.concatenate([rows_of(inputs, io), *([telling_rows(inputs, io)] if inputs > 1 else [])])
    fixed = fixed_parameters(0.0371, -9, -127, 100) if kind == FIXED else None
    codes, scale, zero = parts(x, kind, fixed)
    want_codes, want_scale, want_zero = rounded(x, kind, fixed)
    np.testing.assert_array_equal(codes, want_codes)
    assert same_bits(scale, want_scale)
    np.testing.assert_array_equal(zero, want_zero)


@pytest.mark.parametrize("io", TYPES)
@pytest.mark.parametrize("inputs", [7, 96, 1000])
def test_equals_torchao(io: str, inputs: int) -> None:
    """Its own operators, called as its linears call them: 8da4w, Int8DynActInt4WeightLinear, int8 with int8."""
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    mapping, x = primitives.MappingType, tensor(rows_of(inputs, io))
    wide = {"scale_dtype": torch.float32, "eps": torch.finfo(torch.float32).eps}
    asked: dict[str, tuple[Any, dict[str, Any]]] = {
        AFFINE: (mapping.ASYMMETRIC, {"zero_point_dtype": torch.int8}),
        AFFINE_F32: (mapping.ASYMMETRIC, {"zero_point_dtype": torch.float32, **wide}),
        SYMMETRIC: (mapping.SYMMETRIC, {"zero_point_dtype": torch.int8, "keepdim": True, **wide}),
    }
    for kind, (how, options) in asked.items():
        given = ((1, inputs), torch.int8, -128, 127)
        scale, zero = primitives.choose_qparams_affine(x, how, *given, **options)
        codes = primitives.quantize_affine(x, given[0], scale, zero, *given[1:])
        got = parts(array(x), kind)
        finite = ~np.isnan(got[1])
        assert finite.sum() >= len(x) - 6
        for ours, theirs in zip(got, (codes, scale.float().flatten(), zero.flatten()), strict=True):
            np.testing.assert_array_equal(ours[finite], array(theirs)[finite])
        assert not torch.isfinite(scale.flatten()[torch.from_numpy(~finite)].float()).any()


@pytest.mark.parametrize("io", TYPES)
@pytest.mark.parametrize("inputs", [7, 96, 1000])
def test_equals_quantize_per_token(io: str, inputs: int) -> None:
    """Which computes codes in float64; ties of rows whose scale is a power of two, or anything else."""
    x = rows_of(inputs, io)
    scale, zero = Q.choose_qparams_per_token_asymmetric(tensor(x), torch.int8)
    codes = Q.quantize_per_token(tensor(x), scale, zero, -128, 127, torch.int8)
    got = parts(x, AFFINE_F64)
    finite = ~np.isnan(got[1])
    assert finite.sum() >= len(x) - 6
    for ours, theirs in zip(got, (codes, scale.flatten().float(), zero.flatten()), strict=True):
        np.testing.assert_array_equal(ours[finite], array(theirs)[finite])


@pytest.mark.parametrize("io", TYPES)
@pytest.mark.parametrize(
    ("kind", "least", "most"), [(torch.int8, -128, 127), (torch.uint8, 0, 255), (torch.uint8, 0, 127)]
)
def test_fixed_scales_equal_quantize_per_tensor(io: str, kind: torch.dtype, least: int, most: int) -> None:
    shift = 0 if kind is torch.int8 else 128
    x = rows_of(96, io)
    for scale, zero in ((0.0371, least + 9), (1 / 3, least), (2.0**-7, most), (4.7e-5, least + 100)):
        codes = Q.quantize_per_tensor(tensor(x), scale, zero, least, most, kind)
        fixed = fixed_parameters(scale, zero - shift, least - shift, most - shift)
        got = parts(x, FIXED, fixed)
        np.testing.assert_array_equal(got[0], array(codes).astype(np.int64) - shift)
        assert (got[1] == np.float32(scale)).all() and (got[2] == zero - shift).all()


@pytest.mark.parametrize("kind", KINDS)
def test_bad_rows_and_zero_rows(kind: str) -> None:
    """A bad row is NaN; zeros have the least scale and the code that means zero, as in torchao."""
    x = np.array(
        [[1, 2], [np.nan, 2], [1, np.inf], [-np.inf, 3], [0, -0.0], [3, -4], [3e38, -3e38]], np.float32
    )
    fixed = fixed_parameters(0.5, 3) if kind == FIXED else None
    codes, scale, zero = parts(x, kind, fixed)
    overflows = kind in (AFFINE, AFFINE_F32, AFFINE_F64)
    np.testing.assert_array_equal(np.isnan(scale), [False, True, True, True, False, False, overflows])
    assert not codes[1:4].any() and not zero[1:4].any()
    least = {AFFINE: 2.0**-126, FIXED: 0.5}.get(kind, 2.0**-23)
    meaning = {SYMMETRIC: 0, FIXED: 3, AFFINE_F64: 127}.get(kind, -128)
    assert scale[4] == np.float32(least) and (codes[4] == meaning).all() and zero[4] == meaning


WEIGHTS = [(bits, zeros, "integers") for bits in (4, 8) for zeros in ZEROS]
WEIGHTS += [(4, "symmetric", "e2m1"), (4, "symmetric", "iq4nl")]


@pytest.mark.parametrize(("bits", "zeros", "levels"), WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_linear_equals_the_twin(kind: str, bits: int, zeros: str, levels: str) -> None:
    fixed = fixed_parameters(0.0371, -9, -127, 100) if kind == FIXED else None
    shapes = ((20, 100, 24), (7, 35, 35))
    for seed, ((outputs, inputs, size), io) in enumerate(zip(shapes, ("f32", "bf16"), strict=True)):
        weight = random_weight(seed, outputs, inputs, size, zeros, "f16", seed == 0, bits, levels)
        x = np.concatenate([telling_rows(inputs, io), random_activations(seed, 9, inputs, io)])
        given = (*linear_arguments(x, weight, kind), tensor(fixed))
        assert same_bits(array(torch.ops.halfbyte.linear(*given)), linear(x, weight, kind, fixed))
        empty = (*linear_arguments(x[:0], weight, kind), tensor(fixed))
        assert torch.ops.halfbyte.linear(*empty).shape == (0, outputs)
        packed = pack_column_sums(quant_tensor("layer", weight))
        assert same_bits(packed[:outputs], column_sums(weight)) and not packed[outputs:].any()


@pytest.mark.parametrize("zeros", ZEROS)
def test_it_is_the_product_of_what_is_dequantized(zeros: str) -> None:
    """To the rounding of floats, of rows whose zero points are far from the middle too."""
    weight = random_weight(3, 20, 96, 32, zeros, bias=True)
    x = np.concatenate([np.abs(random_activations(5, 9, 96)), random_activations(6, 9, 96)])
    for kind in (AFFINE, SYMMETRIC, FIXED):
        fixed = fixed_parameters(0.05, -100) if kind == FIXED else None
        codes, scale, zero = rounded(x, kind, fixed)
        want = (codes - zero[:, None]) * scale[:, None].astype(
            np.float64
        ) @ weight.dequantized().T + weight.bias
        got = array(torch.ops.halfbyte.linear(*linear_arguments(x, weight, kind), tensor(fixed)))
        near = 128 * scale[:, None] * np.abs(column_sums(weight)).max() + np.abs(want).max(1, keepdims=True)
        assert (np.abs(got - want) <= 4e-7 * near).all()


def test_what_the_operator_refuses() -> None:
    weight, x = random_weight(1, 8, 16, 8), random_activations(1, 2, 16)
    fixed = tensor(fixed_parameters(0.5, 3))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        for kind, given, said in (
            ("int9", None, "int8_affine"),
            (FIXED, None, "need fixed"),
            (AFFINE, fixed, "goes with int8_fixed"),
            (FIXED, fixed[:3], "least, most"),
        ):
            with pytest.raises(RuntimeError, match=said):
                torch.ops.halfbyte.linear(*linear_arguments(x, weight, kind), given)
