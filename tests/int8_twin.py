"""Activations in int8 as PyTorch's tools round them, and linears of such codes, in numpy.

Written from torchao's and PyTorch's descriptions of their operators: every step of choosing a scale is an operation of
the dtype of x, as numpy (and ml_dtypes) have them.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy_twin import Array, Weight, flushed, fma

AFFINE, AFFINE_F32, AFFINE_F64 = "int8_affine", "int8_affine_f32", "int8_affine_f64"
SYMMETRIC, FIXED = "int8_symmetric", "int8_fixed"
KINDS = (AFFINE, AFFINE_F32, AFFINE_F64, SYMMETRIC, FIXED)
_EPS = 2.0**-23


def fixed_parameters(scale: float, zero: int, least: int = -128, most: int = 127) -> Array:
    """What the operators take as ``fixed``."""
    return np.array([scale, 1.0 / scale, zero, least, most]).astype(np.float32)


def rounded(x: Array, kind: str, fixed: Array | None = None) -> tuple[Array, Array, Array]:
    """int64 codes [M, K], float32 scales and int64 zero points [M], of which a bad row's are 0, NaN and 0."""
    codes, scales = np.zeros(x.shape, np.int64), np.full(x.shape[0], np.nan, np.float32)
    zeros = np.zeros(x.shape[0], np.int64)
    with np.errstate(all="ignore"):
        for m, row in enumerate(flushed(x.astype(np.float32)).astype(x.dtype)):
            if not np.isfinite(row.astype(np.float32)).all():
                continue
            if kind == FIXED:
                assert fixed is not None
                scale, inverse, zero, least, most = fixed
                ratio = row.astype(np.float32) * inverse
            else:
                scale, zero = _parameters(row, kind)
                inner = row.astype({AFFINE: x.dtype, AFFINE_F64: np.float64}.get(kind, np.float32))
                ratio = inner * (inner.dtype.type(1) / inner.dtype.type(scale))
                least, most = -128, 127
            if np.isfinite(np.float32(scale)):
                scales[m], zeros[m] = np.float32(scale), int(zero)
                whole = np.rint(ratio.astype(np.float64)) + float(zero)
                if kind == AFFINE_F64:
                    whole = np.rint(ratio + float(zero))
                codes[m] = np.clip(whole, float(least), float(most)).astype(np.int64)
    return codes, scales, zeros


def _parameters(row: Array, kind: str) -> tuple[Any, int]:
    number = row.dtype.type
    smallest: Any = ml_dtypes.finfo(row.dtype).smallest_normal
    low, high = min(row.min(), number(0)), max(row.max(), number(0))
    if kind == SYMMETRIC:
        return max(number(max(-low, high) / number(127.5)), number(_EPS)), 0
    scale = max((high - low) / number(255), number(smallest if kind == AFFINE else _EPS))
    if kind == AFFINE_F64:  # XNNPACK's: of the ends of the range, the one whose code is off by less
        down, up = low / scale, high / scale
        low_end, high_end = number(-128) - down, number(127) - up
        off = (number(-128) + down) + (number(127) + up)
        return scale, int(np.rint(np.clip(float(low_end if off > 0 else high_end), -128, 127)))
    return scale, int(np.clip(-128 - np.rint(float(low / scale)), -128, 127))


def column_sums(weight: Weight) -> Array:
    """float32 [N]: the sums of the dequantized rows, exact and rounded once."""
    return np.array([math.fsum(row) for row in weight.dequantized()]).astype(np.float32)


def linear(x: Array, weight: Weight, kind: str, fixed: Array | None = None) -> Array:
    """[M, N] of the dtype of x [M, K]."""
    codes, scales, zeros = rounded(x, kind, fixed)
    outputs, inputs = weight.codes.shape
    total, whole = np.zeros((len(x), outputs), np.float32), weight.whole()
    with np.errstate(all="ignore"):
        for g, start in enumerate(range(0, inputs, weight.group_size)):
            part = slice(start, start + weight.group_size)
            sums = (codes[:, part] @ whole[:, part].T).astype(np.float32)
            total = fma(sums, weight.scale[:, g].astype(np.float32), total)
            if weight.minimum is not None:
                alone = codes[:, part].sum(1, keepdims=True).astype(np.float32)
                total = fma(alone, weight.minimum[:, g].astype(np.float32), total)
        if kind != SYMMETRIC:
            total = fma(-zeros.astype(np.float32)[:, None], column_sums(weight), total)
        total = flushed(total * scales[:, None])
        if weight.bias is not None:
            total = flushed(total + weight.bias.astype(np.float32))
        return total.astype(x.dtype)


def taken_off(x: Array, weight: Weight, kind: str, fixed: Array | None = None) -> Array:
    """float64 [M]: the most that a zero point takes off an output of a row; sums are rounded in proportion to it."""
    _, scales, zeros = rounded(x, kind, fixed)
    largest = np.abs(column_sums(weight)).max(initial=0)
    return np.nan_to_num(scales.astype(np.float64) * np.abs(zeros) * largest)
