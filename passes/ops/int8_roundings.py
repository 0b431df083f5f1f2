"""Activations rounded to int8 as PyTorch's own tools do: x is near scale * (code - zero), codes are -128..127.

Semantics: torchao's ``choose_qparams_affine`` and ``quantize_affine`` (`quant_primitives`) as its linears call them,
``quantized_decomposed.choose_qparams_per_token_asymmetric`` with ``quantize_per_token``, and ``quantize_per_tensor``.
All divide once, by the scale, and multiply by what that gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.passes.levels import Levels
from halfbyte.passes.ops.float32 import flush
from halfbyte.passes.scheme import Activations


@dataclass(frozen=True)
class Int8Rounding:
    """How the scale of a token is chosen.

    Attributes:
        zeros: the codes' range is that of the token's values, zero among them, and the zero point says where zero
            is; otherwise it is as wide on both sides.
        divisor: of that range (of the largest magnitude without ``zeros``); gives the scale.
        least: what a scale is raised to; None for the smallest normal number of the dtype of x.
        narrow: codes too are computed in the dtype of x; otherwise in float32. The scale and the zero point always
            are computed in the dtype of x, every operation rounded to it.
        double: codes are computed in float64, rounded after the zero point is added; the zero point is that of the end
            of the range where it is off by less, and rounded last.
    """

    zeros: bool
    divisor: float
    least: float | None
    narrow: bool
    double: bool = False

    def least_scale(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).smallest_normal if self.least is None else self.least


ROUNDINGS = {
    Activations.INT8_AFFINE: Int8Rounding(True, 255.0, None, True),
    Activations.INT8_AFFINE_F32: Int8Rounding(True, 255.0, 2.0**-23, False),
    Activations.INT8_AFFINE_F64: Int8Rounding(True, 255.0, 2.0**-23, False, True),
    Activations.INT8_SYMMETRIC: Int8Rounding(False, 127.5, 2.0**-23, False),
}
# What ``fixed`` of an operator holds, in this order.
FIXED = ("scale", "inverse", "zero", "least", "most")


@dataclass(frozen=True)
class FixedRounding:
    """What ``int8_fixed`` rounds all tokens with: x is near scale * (code - zero).

    Attributes:
        scale: float32.
        zero: the code of zero.
        least, most: the range of codes.
    """

    scale: float
    zero: int = 0
    least: int = -128
    most: int = 127

    @property
    def computed(self) -> bool:
        """Whether an operator takes it: codes in -128..127, scale and its inverse normal numbers above 0."""
        if not all(-128 <= code <= 127 for code in (self.zero, self.least, self.most)):
            return False
        both, info = self.tensor()[:2], torch.finfo(torch.float32)
        return bool(((both >= info.smallest_normal) & (both <= info.max)).all())

    def tensor(self) -> torch.Tensor:
        """float32 [5], as operators take it: `FIXED`, where the inverse is rounded once."""
        inverse = 1.0 / self.scale if self.scale else 0.0
        values = (self.scale, inverse, self.zero, self.least, self.most)
        return torch.tensor(values, dtype=torch.float64).float()


def int8_rounded(
    x: torch.Tensor, kind: Activations, fixed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and zero point of every row of ``x``, each row by itself.

    With zero points (``int8_affine``, ``int8_affine_f32``):

        low, high = min(min x, 0), max(max x, 0)
        scale     = max((high - low) / 255, least)      least: the smallest normal number of the dtype of x
        zero      = clamp(-128 - round(low / scale), -128, 127)
        code      = clamp(round(x * (1 / scale)) + zero, -128, 127)

    every operation rounded to the dtype of x; ``int8_affine_f32`` has the least scale 2^-23, and computes the last
    line in float32.
    ``int8_affine_f64`` has the least scale 2^-23, too, and

        down, up  = low / scale, high / scale
        zero      = round(clamp(-128 - down if (down - 128) + (up + 127) > 0 else 127 - up, -128, 127))
        code      = clamp(round(x * (1 / scale) + zero), -128, 127)      this line in float64

    ``int8_symmetric``: scale = max(absmax / 127.5, 2^-23), rounded to the dtype of x; zero = 0, the last line in
    float32. ``int8_fixed``: code = clamp(round(x * inverse) + zero, least, most) in float32.
    Rounding is half to even. A row of zeros gives the least scale, zero point -128 (0 without zero points) and codes
    that are the zero point, as torchao does. A row that holds NaN or Inf, or whose scale would be infinite, gives
    scale NaN, zero point 0 and codes 0, so that everything computed from it is NaN, and touches no other row.
    Subnormal float32 inputs count as zero, unlike in torchao.

    Args:
        x: float32, float16 or bfloat16 [..., K].
        kind: one of `ROUNDINGS`, or ``INT8_FIXED``.
        fixed: for ``INT8_FIXED``, float32 [5]: scale, what x is multiplied with, zero point, least and most code,
            the last three whole numbers in -128..127.

    Returns:
        codes int8 [..., K], scale float32 [...], zero point float32 [...].
    """
    wide = flush(x.float())
    finite = torch.isfinite(wide).all(-1)
    if kind is Activations.INT8_FIXED:
        assert fixed is not None
        scale, inverse, zero, least, most = (part.expand(x.shape[:-1]) for part in fixed.float())
        codes = torch.round(wide * inverse[..., None])
        codes = (codes + zero[..., None]).clamp(least[..., None], most[..., None])
    else:
        rounding = ROUNDINGS[kind]
        scale, zero = _chosen(wide, rounding, x.dtype)
        if rounding.double:
            codes = torch.round(wide.double() * (1.0 / scale.double())[..., None] + zero.double()[..., None])
        else:
            inner = x.dtype if rounding.narrow else torch.float32
            inverse = _rounded(1.0 / scale, inner)
            codes = torch.round(_rounded(wide * inverse[..., None], inner)) + zero[..., None]
        codes = codes.clamp(-128, 127).float()
        finite = finite & torch.isfinite(scale)
    nothing = torch.zeros_like(scale)
    codes = torch.where(finite[..., None], codes, torch.zeros_like(codes))
    scale = torch.where(finite, scale, torch.full_like(scale, float("nan")))
    return codes.to(torch.int8), scale, torch.where(finite, zero, nothing)


def _chosen(
    wide: torch.Tensor, rounding: Int8Rounding, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    above, below = wide.amax(-1).clamp(min=0.0), (-wide).amax(-1).clamp(min=0.0)
    span = _rounded(above + below, dtype) if rounding.zeros else torch.maximum(above, below)
    scale = _rounded(span / rounding.divisor, dtype).clamp(min=rounding.least_scale(dtype))
    if not rounding.zeros:
        return scale, torch.zeros_like(scale)
    down, up = _rounded(below / scale, dtype), _rounded(above / scale, dtype)  # both away from zero
    if not rounding.double:
        return scale, (torch.round(down) - 128.0).clamp(-128, 127)
    ends = _rounded(-128.0 - down, dtype), _rounded(127.0 + up, dtype)
    zero = torch.where(
        _rounded(ends[0] + ends[1], dtype) > 0, _rounded(down - 128.0, dtype), _rounded(127.0 - up, dtype)
    )
    return scale, torch.round(zero.clamp(-128, 127))


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32, rounded to a dtype."""
    return flush(flush(value).to(dtype).float())


def column_sums(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    minimum: torch.Tensor | None,
    bits: int,
    group_size: int,
    levels: Levels,
) -> torch.Tensor:
    """float32 [N]: the sum over the inputs of each output's weights, what zero points of activations are paid with.

    In float64, group by group in ascending order: scale times the exact sum of u - zero, plus (with ``minimum``)
    minimum times the number of inputs; rounded to float32 once.

    Args:
        codes: uint8 [N, K], loose.
        scale, zero, minimum, bits, group_size, levels: as for ``halfbyte::linear``.
    """
    outputs, inputs = codes.shape
    integers = levels.of(codes) if levels.table else codes
    total = torch.zeros(outputs, dtype=torch.float64)
    for group, start in enumerate(range(0, inputs, group_size)):
        part = integers[:, start : start + group_size]
        count, units = part.shape[1], part.sum(-1, dtype=torch.int64).to(torch.float64)
        if zero is not None:
            units = units - count * zero[:, group].to(torch.float64)
        elif minimum is None and not levels.table:
            units = units - count * 2.0 ** (bits - 1)
        total = total + scale[:, group].to(torch.float64) * units
        if minimum is not None:
            total = total + minimum[:, group].to(torch.float64) * count
    return flush(total.to(torch.float32))
