"""The layout of GPTQ tensors: codes packed along K, zero points along N, both in order.

Semantics: AutoGPTQ's and gptqmodel's files, ``W[n, k] = (u[n, k] - z[g(k), n]) * scales[g(k), n]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.passes.words import CodeWords, fields, words_for

# Version 1 stores z - 1 in every field; its writers subtract from whole words, so a field that held 0 borrows
# from the one above it. Adding to the whole word, modulo 2^32, undoes exactly that.
_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class GptqPacking:
    """Field i of word (j, n) of ``qweight`` [ceil(K * bits / 32), N] is u[n, j * 32 / bits + i].

    Attributes:
        version: of the zero points: 1 stores z - 1, 2 stores z.
    """

    version: int
    widths: tuple[int, ...] = (4, 8)
    optional_zeros: bool = False

    @property
    def storage(self) -> str:
        return f"gptq v{self.version}"

    @property
    def mistaken(self) -> tuple[int, str]:
        return (1, "version 2") if self.version == 1 else (-1, "version 1")

    def codes_shape(self, shape: tuple[int, int], bits: int) -> tuple[int, int]:
        return words_for(shape[1], bits), shape[0]

    def codes(self, qweight: torch.Tensor, shape: tuple[int, int], bits: int) -> CodeWords:
        return CodeWords(qweight.t(), shape[1], bits)

    def zeros(self, qzeros: torch.Tensor, outputs: int, bits: int) -> torch.Tensor:
        words = qzeros
        if self.version == 1:
            words = ((qzeros.to(torch.int64) + _ONES[bits]) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
        return fields(words.contiguous(), bits)[:, :outputs].t().contiguous()
