"""ggml's blocks of 256 values (the K types and IQ4_XS): a float16 scale of small integer scales.

The scale of a group is the float16 ``d`` times an integer of at most 8 bits, and its minimum ``-(dmin * m)``:
both are exact as float32. So is a code times its scale, which leaves one rounding, that of adding the minimum, as in
ggml's reference dequantization.
Every function takes uint8 [N, B, bytes of a block] and gives codes uint8 [N, K], scale float32 [N, G] and
minimum float32 [N, G] or None.
"""

from __future__ import annotations

import torch

from halfbyte.checkpoints.gguf_small_blocks import Parts, half, nibbles

_TWO_BITS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)


def q2_k(blocks: torch.Tensor) -> Parts:
    """scales[16] (scale low, minimum high), codes[64], d, dmin; groups of 16."""
    scales, codes = blocks[..., :16], _pairs(blocks[..., 16:80])
    scale, minimum = half(blocks, 80).float(), half(blocks, 82).float()
    return _rows(codes), _scaled(scale, scales & 15), -_scaled(minimum, scales >> 4)


def q3_k(blocks: torch.Tensor) -> Parts:
    """high[32], codes[64], scales[12], d; groups of 16. Codes around 8."""
    high = (blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = _pairs(blocks[..., 32:96]) + (high.flatten(-2) << 2) + 4
    packed = blocks[..., 96:108]
    upper = (packed[..., None, 8:] >> _TWO_BITS[:, None]) & 3
    scales = nibbles(packed[..., :8]) | (upper.flatten(-2) << 4)
    return _rows(codes), _scaled(half(blocks, 108).float(), scales.to(torch.int8) - 32), None


def q4_k(blocks: torch.Tensor) -> Parts:
    """d, dmin, scales[12], codes[128]; groups of 32."""
    codes = _low_then_high(blocks[..., 16:], 32)
    return _rows(codes), *_scales_and_minima(blocks)


def q5_k(blocks: torch.Tensor) -> Parts:
    """d, dmin, scales[12], high[32], codes[128]; groups of 32. Bit i of high byte l belongs to value 32 i + l."""
    high = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = _low_then_high(blocks[..., 48:], 32) | (high.flatten(-2) << 4)
    return _rows(codes), *_scales_and_minima(blocks)


def q6_k(blocks: torch.Tensor) -> Parts:
    """low[128], high[64], scales[16] signed, d; groups of 16. Codes around 128: q + 96."""
    codes = _low_then_high(blocks[..., :128], 64) | (_pairs(blocks[..., 128:192]) << 4)
    scale = _scaled(half(blocks, 208).float(), blocks[..., 192:208].contiguous().view(torch.int8))
    return _rows(codes + 96), scale, None


def iq4_xs(blocks: torch.Tensor) -> Parts:
    """d, high bits of scales[2], low ones[4], codes[128]; groups of 32. Codes of the table `Levels.IQ4NL`."""
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    high = ((blocks[..., 2:4, None] >> _TWO_BITS) & 3).flatten(-2)
    scales = (low | (high << 4)).to(torch.int8) - 32
    codes = _low_then_high(blocks[..., 8:], 16)
    return _rows(codes), _scaled(half(blocks, 0).float(), scales), None


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K: 8 scales and 8 minima of 6 bits each in 12 bytes."""
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 6) << 4)], -1)
    minima = torch.cat([second & 63, (rest >> 4) | ((second >> 6) << 4)], -1)
    return _scaled(half(blocks, 0).float(), scales), -_scaled(half(blocks, 2).float(), minima)


def _scaled(whole: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    """float32 [N, B] times integers [N, B, n] -> float32 [N, B * n], exact."""
    return _rows(whole.unsqueeze(-1) * small.float())


def _low_then_high(octets: torch.Tensor, run: int) -> torch.Tensor:
    """The nibbles of every `run` bytes: first all low ones, then all high ones."""
    return nibbles(octets.unflatten(-1, (-1, run))).flatten(-2)


def _pairs(octets: torch.Tensor) -> torch.Tensor:
    """Fields of two bits of every 32 bytes: first all lowest ones, and so on."""
    return ((octets.unflatten(-1, (-1, 1, 32)) >> _TWO_BITS[:, None]) & 3).flatten(-3)


def _rows(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(values.shape[0], -1)
