"""Digit planes: how a float activation runs on the integer datapath.

Per token and block of inputs the activation becomes a signed integer under a power-of-two scale; the integer is
cut into P balanced base-256 digits, and every digit goes through the int8 inner loop as if it were a row.
"""

from __future__ import annotations

import torch

from halfbyte.passes.ops.float32 import flush

_LEAST_EXPONENT = 32  # biased; keeps the scales and their reciprocals normal numbers
_WIDEST_BLOCK = 128


def digit_block(group_size: int, inputs: int) -> int:
    """Inputs that share one activation scale: the largest divisor of the group that is a multiple of 8, at most 128.

    Blocks never straddle a weight group. A channelwise weight (``group_size >= inputs``) is cut every 128.
    Small blocks keep an outlier from costing the other inputs their low bits, and keep joined digit sums in int32.
    """
    if group_size >= inputs:
        return min(_WIDEST_BLOCK, -(-inputs // 8) * 8)
    return max(size for size in range(8, _WIDEST_BLOCK + 1, 8) if group_size % size == 0)


def digit_planes(x: torch.Tensor, digits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts float activations into balanced base-256 digits.

    With E = 2^floor(log2(absmax of the block)), at least 2^-95, and ``bits = 8 * digits - 3``:
    v = round-half-even(x * 2^bits / E), scale = E * 2^-bits, x ~ v * scale, |v| <= 2^(bits + 1).
    Two digits hold a bfloat16 exactly within 7 binades of its block's largest, three within 15.

    Args:
        x: float32, float16 or bfloat16 [M, K].
        digits: 2 or 3.
        block: inputs per scale; the last block of a row may be shorter.

    Returns:
        int32 [M, digits, K] in -128..127, lowest digit first, and float32 [M, ceil(K / block)] scales. A block
        that holds NaN or Inf has digits 0 and scale NaN.
    """
    rows, columns = x.shape
    blocks = -(-columns // block)
    wide = torch.nn.functional.pad(flush(x.float()), (0, blocks * block - columns)).reshape(
        rows, blocks, block
    )
    finite = torch.isfinite(wide).all(-1)
    safe = torch.where(finite.unsqueeze(-1), wide, torch.zeros_like(wide))
    field = (safe.abs().amax(-1).contiguous().view(torch.int32) >> 23).clamp_min(_LEAST_EXPONENT)
    bits = 8 * digits - 3
    up = ((254 + bits - field) << 23).view(torch.float32)
    scale = torch.where(finite, ((field - bits) << 23).view(torch.float32), torch.nan)
    rest = (
        torch.round(flush(safe * up.unsqueeze(-1))).to(torch.int32).reshape(rows, blocks * block)[:, :columns]
    )
    planes = []
    for _ in range(digits - 1):
        digit = ((rest + 128) & 255) - 128
        planes.append(digit)
        rest = (rest - digit) >> 8
    planes.append(rest)
    return torch.stack(planes, 1), scale
