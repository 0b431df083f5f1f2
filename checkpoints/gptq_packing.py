"""The layout of GPTQ tensors: words of 32 bits that hold codes along K and zero points along N.

Semantics: AutoGPTQ's and gptqmodel's files, ``W[n, k] = (u[n, k] - z[g(k), n]) * scales[g(k), n]``.
"""

from __future__ import annotations

import torch

from halfbyte.checkpoints.words import fields

# Version 1 stores z - 1 in every field; its writers subtract from whole words, so a field that held 0 borrows
# from the one above it. Adding to the whole word, modulo 2^32, undoes exactly that.
_ONES = {4: 0x11111111, 8: 0x01010101}


def unpack_codes(qweight: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [K * bits / 32, N] -> uint8 [N, K]; field i of word (j, n) is u[n, j * 32 / bits + i]."""
    return fields(qweight.t().contiguous(), bits)


def unpack_zeros(qzeros: torch.Tensor, bits: int, version: int, outputs: int) -> torch.Tensor:
    """int32 [G, ceil(N * bits / 32)] -> uint8 [N, G]; the last word of a row may be partly unused.

    Args:
        version: 1 (stored minus one) or 2 (stored as they are).
        outputs: N.
    """
    words = qzeros
    if version == 1:
        words = ((qzeros.to(torch.int64) + _ONES[bits]) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    return fields(words.contiguous(), bits)[:, :outputs].t().contiguous()
