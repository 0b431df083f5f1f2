"""``halfbyte::quantize_per_token``: symmetric int8, one scale per token."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.float32 import flush
from halfbyte.passes.ops.library import LIBRARY

LIBRARY.define("quantize_per_token(Tensor x) -> (Tensor, Tensor)")


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes every row (token) of ``x`` by itself.

    scale = absmax / 127 in float32 (a true division); code = round-half-even(x / scale), clamped to +-127.
    A row of zeros gives scale 0 and codes 0. A row that holds NaN or Inf gives scale NaN and codes 0, so that
    everything computed from it is NaN, and touches no other row. Rounding half to even and the divisor 127
    follow vLLM's dynamic_scaled_int8_quant; its 127.5 variants make ties of every row's largest element.

    Args:
        x: float32, float16 or bfloat16 [..., K].

    Returns:
        codes int8 [..., K] and scale float32 [...].
    """
    wide = flush(x.float())
    absmax = wide.abs().amax(-1)
    finite = torch.isfinite(wide).all(-1)
    scale = flush(absmax / 127.0)
    safe = torch.where(finite & (scale > 0), scale, torch.ones_like(scale))
    codes = torch.round(wide / safe.unsqueeze(-1)).clamp(-127, 127)
    codes = torch.where((finite & (scale > 0)).unsqueeze(-1), codes, torch.zeros_like(codes))
    scale = torch.where(finite, scale, torch.full_like(scale, float("nan")))
    return codes.to(torch.int8), scale


def _fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


LIBRARY.impl("quantize_per_token", quantize_per_token, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::quantize_per_token", _fake, lib=LIBRARY)
