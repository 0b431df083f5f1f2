"""Words of 32 bits that hold several codes, lowest bits first (GPTQ, AWQ and compressed-tensors)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

WORD_BITS = 32
_AT_ONCE = 2**16


def words_for(count: int, bits: int) -> int:
    """How many words hold so many codes."""
    return -(-count * bits // WORD_BITS)


@dataclass(frozen=True)
class CodeWords:
    """The codes of a weight in words along its inputs, as files have them: half the memory of a byte per code.

    Attributes:
        words: int32 [N, ceil(K * bits / 32)], field i of word j for input j * 32 / bits + i; of any strides. What
            fields behind K hold means nothing.
        inputs: K.
        bits: 4 or 8.
    """

    words: torch.Tensor
    inputs: int
    bits: int

    def __post_init__(self) -> None:
        if self.words.dtype != torch.int32 or self.words.shape[1] != words_for(self.inputs, self.bits):
            raise ValueError(f"{self.words.dtype} {list(self.words.shape)} for {self.inputs} inputs")

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.inputs

    def codes(self) -> torch.Tensor:
        """uint8 [N, K], a byte each."""
        return fields(self.words.contiguous(), self.bits)[:, : self.inputs].contiguous()


def loose(stored: torch.Tensor | CodeWords) -> torch.Tensor:
    """uint8 [N, K], a byte each, of codes in either form."""
    return stored.codes() if isinstance(stored, CodeWords) else stored


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
