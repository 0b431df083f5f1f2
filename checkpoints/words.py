"""Words of 32 bits that hold several codes, lowest bits first (GPTQ, AWQ and compressed-tensors)."""

from __future__ import annotations

import numpy as np
import torch

WORD_BITS = 32
_AT_ONCE = 2**16


def words_for(count: int, bits: int) -> int:
    """How many words hold so many codes."""
    return -(-count * bits // WORD_BITS)


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, C * 32 / bits], for 4 and 8 bits (all little-endian)."""
    octets = words.flatten().view(torch.uint8)  # flat, since a single column may have any stride
    return (_nibbles(octets) if bits == 4 else octets).reshape(words.shape[0], -1)


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """uint8 [n] -> [2n], low nibbles first; a byte becomes two in one 16-bit step, a cache full at a time."""
    source, pairs = octets.numpy(), np.empty(len(octets), np.uint16)
    for start in range(0, len(source), _AT_ONCE):
        part = source[start : start + _AT_ONCE].astype(np.uint16)
        part |= part << 4
        np.bitwise_and(part, 0x0F0F, out=pairs[start : start + _AT_ONCE])
    return torch.from_numpy(pairs.astype("<u2", copy=False).view(np.uint8))
