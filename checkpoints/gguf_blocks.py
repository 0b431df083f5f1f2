"""ggml's block layouts, from the bytes of rows to codes, scales and minima.

Blocks of 32 values run along K; d and m are float16. Semantics: ggml's reference dequantization,
Q4_0 ``(u - 8) * d``, Q4_1 ``u * d + m``, Q8_0 ``q * d``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 32
_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
INTEGER = ("q4_0", "q4_1", "q8_0")
_ROWS = 2048


@dataclass(frozen=True)
class Blocks:
    """Codes uint8 [N, K], scale float16 [N, K / 32], minimum likewise or None; bits 4 or 8 (zero is 8 or 128)."""

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None
    bits: int = 4


def float_dtype(kind: str) -> torch.dtype:
    """The dtype that `float_rows` gives for a type."""
    return _FLOATS.get(kind, torch.float32)


def can_dequantize(kind: str, number: int) -> bool:
    """Whether `float_rows` can read a type: floats, Q4_0, Q4_1, Q8_0, and what the gguf package can."""
    if kind in _FLOATS or kind in INTEGER:
        return True
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    quantization = GGMLQuantizationType(number)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[quantization][1]), np.uint8), quantization)
    except NotImplementedError:
        return False
    return True


def integer_rows(raw: torch.Tensor, kind: str) -> Blocks:
    """uint8 [N, row bytes] of Q4_0, Q4_1 or Q8_0 -> `Blocks`.

    Byte j of a 4-bit block holds values j (low) and j + 16; Q8_0's signed bytes become codes by adding 128.
    """
    if kind == "q8_0":
        octets = raw.reshape(raw.shape[0], -1, 2 + BLOCK)
        codes = (octets[..., 2:] ^ 128).reshape(raw.shape[0], -1)
        return Blocks(codes, _halves(octets, 0), None, 8)
    head = 2 if kind == "q4_0" else 4
    blocks = raw.reshape(raw.shape[0], -1, head + BLOCK // 2)
    octets = blocks[..., head:]
    codes = torch.cat([octets & 15, octets >> 4], -1).reshape(raw.shape[0], -1)
    minimum = _halves(blocks, 2) if kind == "q4_1" else None
    return Blocks(codes, _halves(blocks, 0), minimum)


def float_rows(raw: torch.Tensor, kind: str, number: int) -> torch.Tensor:
    """uint8 [rows, row bytes] of any type `can_dequantize` names -> `float_dtype` [rows, K]."""
    if kind in _FLOATS:
        return raw.contiguous().view(_FLOATS[kind])
    # In parts, so that a large embedding needs little more memory than its result.
    first = _dequantized(raw[:_ROWS], kind, number)
    if len(raw) <= _ROWS:
        return first
    values = torch.empty(len(raw), first.shape[1])
    values[:_ROWS] = first
    for start in range(_ROWS, len(raw), _ROWS):
        values[start : start + _ROWS] = _dequantized(raw[start : start + _ROWS], kind, number)
    return values


def _dequantized(raw: torch.Tensor, kind: str, number: int) -> torch.Tensor:
    if kind in INTEGER:
        blocks = integer_rows(raw, kind)
        scale = blocks.scale.float().repeat_interleave(BLOCK, 1)
        if blocks.minimum is None:
            return (blocks.codes.float() - 2 ** (blocks.bits - 1)) * scale
        return blocks.codes.float() * scale + blocks.minimum.float().repeat_interleave(BLOCK, 1)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(
        np.ascontiguousarray(dequantize(raw.numpy(), GGMLQuantizationType(number)), np.float32)
    )


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """float16 [N, G] that stands at byte `at` of every block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]
