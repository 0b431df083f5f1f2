"""RMSNorm as the kernels compute it: with a sum of stated order, so that references and kernels give equal bits."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.float32 import flush, fma

# Partial sums of a row; they are then added to each other by halves.
SUMS = 64


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, row by row (https://arxiv.org/abs/1910.07467).

    Partial sum j adds the squares of the inputs j, j + 64, ... by fused multiply-adds in ascending order; then 64
    sums become 32 by adding number i + 32 to number i, and so on to one. Every other operation is rounded on its
    own; x is multiplied by the reciprocal of the root first.

    Args:
        x: float32 [..., K].
        weight: float32 [K].
        eps: taken as float32.
        plus_one: the factor is ``1 + weight``, as in Gemma.
    """
    inputs = x.shape[-1]
    wide = flush(x)
    parts = torch.nn.functional.pad(wide, (0, -inputs % SUMS)).unflatten(-1, (-1, SUMS))
    total = torch.zeros_like(parts[..., 0, :])
    for number in range(parts.shape[-2]):
        total = fma(parts[..., number, :], parts[..., number, :], total)
    while total.shape[-1] > 1:
        low, high = total.chunk(2, -1)
        total = flush(low + high)
    root = torch.sqrt(flush(total / inputs) + torch.tensor(eps, dtype=torch.float32))
    factor = flush(weight + 1.0) if plus_one else flush(weight)
    return flush(flush(wide * flush(1.0 / root)) * factor)
