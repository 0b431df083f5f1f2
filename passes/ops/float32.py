"""Float32 arithmetic as the compiled kernels do it: fused multiply-add, exact roots, subnormals flushed to zero.

IREE runs dispatches with subnormals flushed (inputs and results), so the references do the same.
"""

from __future__ import annotations

import torch

_SMALLEST_NORMAL = 2.0**-126


def flush(x: torch.Tensor) -> torch.Tensor:
    """float32 with subnormal values replaced by zero of the same sign; NaN and Inf stay."""
    return torch.where(x.abs() < _SMALLEST_NORMAL, x * 0.0, x)


def root(x: torch.Tensor) -> torch.Tensor:
    """float32 square root, rounded to nearest: torch's own may be off by a unit in tensors of some size."""
    return torch.sqrt(x.double()).float()


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """float32 ``a * b + c``, rounded once, elementwise with broadcasting.

    The product of two float32 is exact in float64. The float64 sum is rounded to odd, so that the rounding to
    float32 is the only one that counts.
    """
    product, addend = a.double() * b.double(), c.double()
    product, addend = torch.broadcast_tensors(product, addend)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.contiguous().view(torch.int64)
    inexact = torch.isfinite(total) & (error != 0) & (bits & 1 == 0)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where(inexact, bits + step, bits).view(torch.float64)
    return flush(odd.float())
