"""ggml's blocks of 32 values: a float16 scale, perhaps a float16 minimum, and codes.

Semantics: ggml's reference dequantization. ``Q4_0`` ``(u - 8) * d``, ``Q4_1`` ``u * d + m``, ``Q5_0``
``(u - 16) * d``, ``Q5_1`` ``u * d + m``, ``Q8_0`` ``q * d``, ``IQ4_NL`` ``table[u] * d``.
Every function takes uint8 [N, B, bytes of a block] and gives codes uint8 [N, K], scale float16 [N, B] and
minimum float16 [N, B] or None.
"""

from __future__ import annotations

import torch

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def q4_0(blocks: torch.Tensor) -> Parts:
    return _rows(nibbles(blocks[..., 2:])), half(blocks, 0), None


def q4_1(blocks: torch.Tensor) -> Parts:
    return _rows(nibbles(blocks[..., 4:])), half(blocks, 0), half(blocks, 2)


def q5_0(blocks: torch.Tensor) -> Parts:
    """Codes around 128: u + 112."""
    codes = nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _rows(codes + 112), half(blocks, 0), None


def q5_1(blocks: torch.Tensor) -> Parts:
    codes = nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _rows(codes), half(blocks, 0), half(blocks, 2)


def q8_0(blocks: torch.Tensor) -> Parts:
    """Codes around 128: q + 128."""
    return _rows(blocks[..., 2:] ^ 128), half(blocks, 0), None


def iq4_nl(blocks: torch.Tensor) -> Parts:
    """Codes of the table `Levels.IQ4NL`."""
    return _rows(nibbles(blocks[..., 2:])), half(blocks, 0), None


def nibbles(octets: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> [..., 2n]: all low nibbles, then all high ones (byte j holds values j and j + n)."""
    return torch.cat([octets & 15, octets >> 4], -1)


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """float16 [N, B] that stands at byte `at` of every block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _fifth_bits(octets: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4] -> [..., 32]: bit i of the 32, as 16 or 0."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((octets.unsqueeze(-1) >> places) & 1).flatten(-2) << 4


def _rows(codes: torch.Tensor) -> torch.Tensor:
    return codes.reshape(codes.shape[0], -1)
