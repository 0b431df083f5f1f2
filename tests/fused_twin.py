"""The arithmetic of ``halfbyte::fused_linear`` in numpy, written from its description."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from moe_twin import exponential, glu
from norm_twin import rms_norm
from numpy_twin import Array, Weight, flushed, fma, linear


@dataclass(frozen=True)
class Around:
    """What a linear is fused with. norm: its weight [K]; glu: of the outputs' halves; residual: something is added."""

    norm: Array | None = None
    eps: float = 1e-5
    plus_one: bool = False
    glu: str = ""
    residual: bool = False


def fused_linear(
    x: Array, weight: Weight, digits: int, around: Around, residual: Array | None, fuses: bool = True
) -> Array:
    """Float32 [M, N] or, with a product, [M, N / 2]; ``fuses`` is about the norm's sums."""
    if around.norm is not None:
        x = rms_norm(x, around.norm, around.eps, around.plus_one, fuses=fuses)
    y = linear(x, weight, digits)
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
