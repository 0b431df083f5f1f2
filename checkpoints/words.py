"""Words of 32 bits that hold several small values."""

from __future__ import annotations

import torch

WORD_BITS = 32


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, C * 32 / bits], lowest bits first (all little-endian); bits is 4 or 8."""
    octets = words.flatten().view(torch.uint8)  # flat, since a single column may have any stride
    if bits == 4:
        octets = torch.stack([octets & 15, octets >> 4], -1)
    return octets.reshape(words.shape[0], -1)


def words_for(count: int, bits: int) -> int:
    """Words that hold `count` values; the last may be partly unused."""
    return -(-count * bits // WORD_BITS)
