"""Dynamic e4m3 activations, one scale per token."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.float32 import flush

_LARGEST = 448.0


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes every row (token) of ``x`` to e4m3 by itself.

    scale = absmax / 448 in float32 (a true division); code = e4m3(x / scale), half to even, never above 448: the
    rule of vLLM's per-token fp8 quantization and of compressed-tensors. A row of zeros gives scale 0; a row with NaN
    or Inf gives scale NaN. Codes of both are 0.

    Args:
        x: float32, float16 or bfloat16 [..., K].

    Returns:
        the codes' values, float32 [..., K], and scale float32 [...].
    """
    wide = flush(x.float())
    finite = torch.isfinite(wide).all(-1)
    scale = flush(wide.abs().amax(-1) / _LARGEST)
    usable = finite & (scale > 0)
    ratio = wide / torch.where(usable, scale, torch.ones_like(scale)).unsqueeze(-1)
    ratio = torch.where(usable.unsqueeze(-1), ratio, torch.zeros_like(ratio))
    scale = torch.where(finite, scale, torch.full_like(scale, float("nan")))
    return round_e4m3(ratio), scale


def round_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float32 rounded to the nearest e4m3 value, half to even, saturating at 448; subnormals (of 2^-9) included."""
    magnitude = values.abs().clamp_max(_LARGEST).double()
    exponent = torch.floor(torch.log2(magnitude.clamp_min(2.0**-9))).clamp_min(-6.0)
    quantum = torch.exp2(exponent - 3.0)
    rounded = (torch.round(magnitude / quantum) * quantum).clamp_max(_LARGEST)
    return torch.copysign(rounded.float(), values)
