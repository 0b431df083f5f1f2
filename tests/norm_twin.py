"""The arithmetic of ``halfbyte::rms_norm`` in numpy, written from its description."""

from __future__ import annotations

import numpy as np
from numpy_twin import Array, flushed, fma


def rms_norm(
    x: Array,
    weight: Array | None,
    eps: float,
    plus_one: bool = False,
    rounds: bool = False,
    fuses: bool = True,
) -> Array:
    """[M, K] of the dtype of x, row by row, sum by sum; ``fuses``: with fused multiply-adds, as most devices have."""
    out = np.empty_like(x)
    with np.errstate(all="ignore"):
        factor = np.float32(1) if weight is None else flushed(weight.astype(np.float32))
        factor = flushed(factor + np.float32(1)) if plus_one else factor
        for row, given in enumerate(flushed(x.astype(np.float32))):
            sums = np.zeros(64, np.float32)
            for start in range(0, len(given), 64):
                piece = given[start : start + 64]
                before = sums[: len(piece)]
                sums[: len(piece)] = fma(piece, piece, before) if fuses else piece * piece + before
            for half in (32, 16, 8, 4, 2, 1):
                sums = flushed(sums[:half] + sums[half:])
            square = flushed(sums[0] / np.float32(len(given))) + np.float32(eps)
            even = flushed(given * flushed(np.float32(1) / np.sqrt(square)))
            even = even.astype(x.dtype).astype(np.float32) if rounds else even
            out[row] = flushed(even * factor).astype(x.dtype)
    return out
