"""Words of 32 bits that hold several codes, lowest bits first (GPTQ, AWQ and compressed-tensors)."""

from __future__ import annotations

import torch

WORD_BITS = 32


def words_for(count: int, bits: int) -> int:
    """How many words hold so many codes."""
    return -(-count * bits // WORD_BITS)


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, C * 32 / bits], for 4 and 8 bits (all little-endian)."""
    octets = words.flatten().view(torch.uint8)  # flat, since a single column may have any stride
    if bits == 4:
        octets = torch.stack([octets & 15, octets >> 4], -1)
    return octets.reshape(words.shape[0], -1)
