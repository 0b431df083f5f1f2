"""The arithmetic of ``halfbyte::fused_linear`` in numpy, written from its description."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from moe_twin import exponential, glu
from numpy_twin import Array, Weight, flushed, fma, linear


@dataclass(frozen=True)
class Around:
    """What a linear is fused with. norm: its weight [K]; glu: of the outputs' halves; residual: something is added."""

    norm: Array | None = None
    eps: float = 1e-5
    plus_one: bool = False
    glu: str = ""
    residual: bool = False


def rms_norm(x: Array, around: Around, fuses: bool = True) -> Array:
    """Float32 [M, K], row by row, sum by sum; ``fuses``: with fused multiply-adds, as every device that has them."""
    assert around.norm is not None
    out, weight = np.empty_like(x), flushed(around.norm)
    with np.errstate(all="ignore"):
        factor = flushed(weight + np.float32(1)) if around.plus_one else weight
        for row, given in enumerate(flushed(x)):
            sums = np.zeros(64, np.float32)
            for start in range(0, len(given), 64):
                piece = given[start : start + 64]
                before = sums[: len(piece)]
                sums[: len(piece)] = fma(piece, piece, before) if fuses else piece * piece + before
            for half in (32, 16, 8, 4, 2, 1):
                sums = flushed(sums[:half] + sums[half:])
            square = flushed(sums[0] / np.float32(len(given))) + np.float32(around.eps)
            inverse = flushed(np.float32(1) / np.sqrt(square))
            out[row] = flushed(flushed(given * inverse) * factor)
    return out


def fused_linear(
    x: Array, weight: Weight, digits: int, around: Around, residual: Array | None, fuses: bool = True
) -> Array:
    """Float32 [M, N] or, with a product, [M, N / 2]; ``fuses`` is about the norm's sums."""
    y = linear(x if around.norm is None else rms_norm(x, around, fuses), weight, digits)
    with np.errstate(all="ignore"):
        if around.glu == "gelu_tanh":
            gate, up = np.split(y, 2, 1)
            slope = fma(
                flushed(gate * gate), np.float32(-0.07135481628), np.float32(-1.595769121605731)
            )  # 2 sqrt(2 / pi) times 0.044715, and itself
            below = np.float32(1) + exponential(flushed(gate * slope))
            y = flushed(flushed(gate / below) * up)
        elif around.glu:
            gate, up = np.split(y, 2, 1)
            y = glu(gate, up, around.glu, 0.0)
        return y if residual is None else flushed(y + flushed(residual))
