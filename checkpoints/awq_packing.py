"""The layout of AWQ tensors (version gemm): codes and zero points packed along N, in an interleaved order.

Semantics: AutoAWQ's files, ``W[n, k] = (u[n, k] - z[g(k), n]) * scales[g(k), n]``; zero points are stored as
they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.passes.words import fields, words_for

# Output 8c + j stands in field _FIELD[j] of word c.
_FIELD = (0, 4, 1, 5, 2, 6, 3, 7)
_ROWS = 512


@dataclass(frozen=True)
class AwqPacking:
    """``qweight`` [K, ceil(N / 8)]; only 4 bits have a known order."""

    storage: str = "awq"
    widths: tuple[int, ...] = (4,)
    optional_zeros: bool = True
    mistaken: tuple[int, str] = (-1, "version 1 of GPTQ")

    def codes_shape(self, shape: tuple[int, int], bits: int) -> tuple[int, int]:
        return shape[1], words_for(shape[0], bits)

    def codes(self, qweight: torch.Tensor, shape: tuple[int, int], bits: int) -> torch.Tensor:
        return _outputs(qweight, shape[0])

    def zeros(self, qzeros: torch.Tensor, outputs: int, bits: int) -> torch.Tensor:
        return _outputs(qzeros, outputs)


def _outputs(words: torch.Tensor, outputs: int) -> torch.Tensor:
    """int32 [R, C] -> uint8 [N, R]."""
    columns = torch.empty((outputs, len(words)), dtype=torch.uint8)
    for start in range(0, len(words), _ROWS):  # in parts, so that memory holds little beside the result
        part = words[start : start + _ROWS].contiguous()
        ordered = fields(part, 4).reshape(len(part), -1, 8)[:, :, list(_FIELD)]
        columns[:, start : start + _ROWS] = ordered.reshape(len(part), -1)[:, :outputs].t()
    return columns
