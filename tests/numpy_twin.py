"""The arithmetic of halfbyte's operators in numpy, written from their descriptions and sharing no code with them.

Everything is float32 with subnormal inputs and results taken as zero; integers are int64 and exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
TYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Weight:
    """A quantized linear: codes [N, K] of 0..15, or 0..255 for 8 bits; scale, zero, minimum [N, G]; bias [N].

    Codes of 4 bits may stand for ``levels``: ``e2m1`` or ``iq4nl``.
    """

    codes: Array
    scale: Array
    group_size: int
    zero: Array | None = None
    minimum: Array | None = None
    bias: Array | None = None
    bits: int = 4
    levels: str = "integers"

    @property
    def middle(self) -> int:
        return 8 if self.bits == 4 else 128

    def whole(self) -> Array:
        """int64 [N, K]: what scales multiply, zero points taken off."""
        if self.levels == "e2m1":  # twice the float's value
            return np.rint(2 * e2m1(self.codes)).astype(np.int64)
        if self.levels == "iq4nl":
            return np.array(_IQ4NL, np.int64)[self.codes]
        codes = self.codes.astype(np.int64)
        if self.minimum is not None:
            return codes
        if self.zero is None:
            return codes - self.middle
        return codes - self.zero.astype(np.int64)[:, np.arange(codes.shape[1]) // self.group_size]

    def dequantized(self) -> Array:
        """float64 [N, K]."""
        group = np.arange(self.codes.shape[1]) // self.group_size
        weight = self.whole() * self.scale.astype(np.float64)[:, group]
        return weight if self.minimum is None else weight + self.minimum.astype(np.float64)[:, group]


# ggml's kvalues_iq4nl.
_IQ4NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def e2m1(codes: Array) -> Array:
    """float64: bit 3 is the sign, bits 1 and 2 the exponent with a bias of 1, bit 0 the mantissa."""
    exponent, mantissa = codes >> 1 & 3, codes & 1
    size = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent.astype(int) - 1))
    return np.where(codes >> 3 == 1, -size, size)


def flushed(x: Array) -> Array:
    """float32; a subnormal becomes a zero of its sign."""
    x = np.asarray(x, np.float32)
    tiny = (x.view(np.uint32) & 0x7F800000) == 0
    return np.where(tiny, np.copysign(np.float32(0), x), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """float32 a * b + c with one rounding.

    In float64 the product is exact and the sum monotone, so rounding twice goes wrong only where the float64 sum
    is halfway between two float32; there the sign of what the sum lost decides.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        product, addend = np.broadcast_arrays(product, np.asarray(c, np.float64))
        total = product + addend
        larger = np.where(np.abs(product) >= np.abs(addend), product, addend)
        smaller = np.where(np.abs(product) >= np.abs(addend), addend, product)
        lost = smaller - (total - larger)
        near = total.astype(np.float32)
        beyond = total - near.astype(np.float64)
        other = np.nextafter(near, np.where(beyond > 0, np.float32(np.inf), np.float32(-np.inf)))
        halfway = (beyond != 0) & (np.abs(other.astype(np.float64) - total) == np.abs(beyond))
        towards = np.where(lost > 0, np.maximum(near, other), np.minimum(near, other))
        return flushed(np.where(halfway & (lost != 0), towards, near))


def quantized_per_token(x: Array) -> tuple[Array, Array]:
    """int64 [M, K] codes and float32 [M] scales."""
    x = flushed(x.astype(np.float32))
    codes, scales = np.zeros(x.shape, np.int64), np.zeros(x.shape[0], np.float32)
    for row in range(x.shape[0]):
        if not np.isfinite(x[row]).all():
            scales[row] = np.nan
            continue
        scales[row] = flushed(np.abs(x[row]).max(initial=0) / np.float32(127))
        if scales[row] > 0:
            codes[row] = np.clip(np.rint(x[row] / scales[row]), -127, 127).astype(np.int64)
    return codes, scales


def widest_block(group_size: int, inputs: int) -> int:
    """Inputs that share the power of two of a digit plane."""
    if group_size >= inputs:
        return min(128, (inputs + 7) // 8 * 8)
    return next(size for size in range(128, 0, -8) if group_size % size == 0)


def digits_of(x: Array, digits: int) -> tuple[Array, np.float32]:
    """int64 [digits, K], lowest first, and the scale, of one row's block."""
    x = flushed(x.astype(np.float32))
    if not np.isfinite(x).all():
        return np.zeros((digits, len(x)), np.int64), np.float32(np.nan)
    largest = float(np.abs(x).max(initial=0))
    exponent = max(int(np.frexp(largest)[1]) - 1 if largest else -(10**6), -95)
    bits = 8 * digits - 3
    whole = np.rint(np.ldexp(x.astype(np.float64), bits - exponent)).astype(np.int64)
    out = []
    for _ in range(digits - 1):
        low = whole % 256
        low = np.where(low >= 128, low - 256, low)
        out.append(low)
        whole = (whole - low) // 256
    return np.stack([*out, whole]), np.float32(np.ldexp(1.0, exponent - bits))


def _joined(sums: list[Array]) -> Array:
    low = (sums[0] if len(sums) == 1 else sums[0] + 256 * sums[1]).astype(np.float32)
    return fma(sums[2].astype(np.float32), np.float32(65536), low) if len(sums) == 3 else low


def e4m3_per_token(x: Array) -> tuple[Array, Array]:
    """int64 [M, K], 512 times the e4m3 values, and float32 [M] scales. ml_dtypes rounds half to even."""
    x = flushed(x.astype(np.float32))
    codes, scales = np.zeros(x.shape, np.int64), np.zeros(x.shape[0], np.float32)
    for row in range(x.shape[0]):
        if not np.isfinite(x[row]).all():
            scales[row] = np.nan
            continue
        scales[row] = flushed(np.abs(x[row]).max(initial=0) / np.float32(448))
        if scales[row] > 0:
            ratio = np.clip(x[row] / scales[row], -448, 448)
            codes[row] = (512 * ratio.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)).astype(np.int64)
    return codes, scales


E4M3 = 0  # where a number of digits is asked for


def linear(x: Array, weight: Weight, digits: int) -> Array:
    """[M, N] of the dtype of x [M, K]. digits 1: int8 per token; 2, 3: digit planes; `E4M3`: e4m3 per token."""
    out = [_row(row, weight, digits) for row in x.astype(np.float32)]
    result = np.stack(out) if out else np.zeros((0, weight.codes.shape[0]), np.float32)
    with np.errstate(over="ignore"):
        return result.astype(x.dtype)


def _row(x: Array, weight: Weight, digits: int) -> Array:
    outputs, inputs = weight.codes.shape
    whole = weight.whole()
    if digits == 1:
        block = weight.group_size
        planes, scales = quantized_per_token(x[None])
        token_scale: np.float32 | None = scales[0]
    elif digits == E4M3:
        planes, scales = e4m3_per_token(x[None])
        block, token_scale = widest_block(weight.group_size, inputs), flushed(scales[0] / np.float32(512))
    else:
        block, token_scale = widest_block(weight.group_size, inputs), None
    total = np.zeros(outputs, np.float32)
    for start in range(0, inputs, block):
        part, g = slice(start, min(start + block, inputs)), start // weight.group_size
        unit = np.float32(1)
        piece = planes[:, part] if digits in (1, E4M3) else None
        if piece is None:
            piece, unit = digits_of(x[part], digits)
        with np.errstate(over="ignore", invalid="ignore"):
            value = _joined([whole[:, part] @ digit for digit in piece]) * unit
            total = fma(value, weight.scale[:, g].astype(np.float32), total)
            if weight.minimum is not None:
                sums = _joined([digit.sum(keepdims=True) for digit in piece]) * unit
                total = fma(sums, weight.minimum[:, g].astype(np.float32), total)
    with np.errstate(over="ignore", invalid="ignore"):
        if token_scale is not None:
            total = flushed(total * token_scale)
        if weight.bias is not None:
            total = flushed(total + weight.bias.astype(np.float32))
    return total


def same_bits(got: Array, want: Array) -> bool:
    """Equal bit for bit, any NaN being as good as another."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    unsigned = np.dtype(f"u{want.dtype.itemsize}")
    nan = np.isnan(want.astype(np.float32))
    equal = np.ascontiguousarray(got).view(unsigned) == np.ascontiguousarray(want).view(unsigned)
    return bool(np.array_equal(np.isnan(got.astype(np.float32)), nan) and (equal | nan).all())


def same_by_row(got: Array, want: Array) -> list[int]:
    """The rows that differ, for messages."""
    return [row for row in range(len(want)) if not same_bits(got[row], want[row])]
