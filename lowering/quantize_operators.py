"""What the ``quantized_decomposed`` operators that stay in a graph consist of.

PyTorch 2 export quantization leaves them in the graph, and torch has no decomposition of them. Semantics:
``torch.ao.quantization.fx._decomposed``; scales are float32 here throughout, where torch takes float64 in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_Pair = tuple[torch.Tensor, torch.Tensor]


def quantize_operators() -> dict[Any, Callable[..., Any]]:
    """Decompositions by operator, of those that exist: importing torch.ao.quantization makes them."""
    library = torch.ops.quantized_decomposed
    return {
        getattr(getattr(library, name), overload): made
        for (name, overload), made in _TABLE.items()
        if hasattr(library, name) and overload in getattr(library, name).overloads()
    }


def _choose_per_tensor(x: torch.Tensor, low: int, high: int, eps: float, dtype: torch.dtype) -> _Pair:
    least, most = x.float().amin().clamp(max=0.0), x.float().amax().clamp(min=0.0)
    return _asymmetric(least.reshape(1), most.reshape(1), low, high, eps)


def _choose_symmetric(x: torch.Tensor, low: int, high: int, eps: float, dtype: torch.dtype) -> _Pair:
    largest = x.float().abs().amax().reshape(1)
    scale = (largest / ((high - low) / 2)).clamp(min=eps)
    return scale, torch.full_like(scale, 128 if dtype is torch.uint8 else 0)


def _choose_per_token(x: torch.Tensor, dtype: torch.dtype) -> _Pair:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return scale, torch.zeros_like(scale)


def _choose_per_token_asymmetric(x: torch.Tensor, dtype: torch.dtype) -> _Pair:
    least = x.float().amin(-1, keepdim=True).clamp(max=0.0)
    most = x.float().amax(-1, keepdim=True).clamp(min=0.0)
    scale = ((most - least) / 255).clamp(min=torch.finfo(torch.float32).eps)
    down, up = least / scale, most / scale
    zero = torch.where(down + up - 1 > 0, -128 - down, 127 - up)  # of the errors at either end, the smaller
    return scale, zero.clamp(-128, 127).round()


def _asymmetric(least: torch.Tensor, most: torch.Tensor, low: int, high: int, eps: float) -> _Pair:
    scale = ((most - least) / (high - low)).clamp(min=eps)
    return scale, (low - (least / scale).round()).clamp(low, high)


def _quantize(
    x: torch.Tensor, scale: Any, zero: Any, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    return _codes((x.float() * (1.0 / scale)).round() + zero, low, high, dtype)


def _quantize_per_token(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    return _codes((x.float() * (1.0 / scale.float()) + zero.float()).round(), low, high, dtype)


def _codes(whole: torch.Tensor, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """By way of int32: floats that become unsigned bytes are cut to 127 where IREE 3.13 makes signed bytes of them."""
    return whole.clamp(low, high).to(torch.int32).to(dtype)


def _dequantize(
    codes: torch.Tensor,
    scale: Any,
    zero: Any,
    low: int,
    high: int,
    dtype: torch.dtype,
    output_dtype: torch.dtype | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return ((codes.float() - zero) * scale).to(out_dtype or output_dtype or torch.float32)


def _dequantize_per_channel(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    axis: int,
    low: int,
    high: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    shape = [1] * codes.dim()
    shape[axis] = -1
    centred = codes.float() if zero is None else codes.float() - zero.float().reshape(shape)
    return (centred * scale.float().reshape(shape)).to(out_dtype or torch.float32)


def _dequantize_per_group(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    low: int,
    high: int,
    dtype: torch.dtype,
    group_size: int = 128,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    grouped = codes.float().unflatten(-1, (-1, group_size))
    if zero is not None:
        grouped = grouped - zero.float().reshape(*grouped.shape[:-1], 1)
    return (grouped * scale.float().reshape(*grouped.shape[:-1], 1)).reshape(codes.shape).to(output_dtype)


_TABLE: dict[tuple[str, str], Callable[..., Any]] = {
    ("choose_qparams", "tensor"): _choose_per_tensor,
    ("choose_qparams_symmetric", "tensor"): _choose_symmetric,
    ("choose_qparams_per_token", "default"): _choose_per_token,
    ("choose_qparams_per_token_asymmetric", "default"): _choose_per_token_asymmetric,
    ("quantize_per_tensor", "default"): _quantize,
    ("quantize_per_tensor", "tensor"): _quantize,
    ("quantize_per_token", "default"): _quantize_per_token,
    ("dequantize_per_tensor", "default"): _dequantize,
    ("dequantize_per_tensor", "tensor"): _dequantize,
    ("dequantize_per_token", "default"): _dequantize,
    ("dequantize_per_channel", "default"): _dequantize_per_channel,
    ("dequantize_per_channel_group", "default"): _dequantize_per_group,
}
