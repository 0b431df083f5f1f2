"""How words hold the codes and zero points of a layer: what GPTQ's and AWQ's layouts have in common."""

from __future__ import annotations

from typing import Protocol

import torch

from halfbyte.passes.words import CodeWords


class Packing(Protocol):
    """A layout of the tensors ``qweight`` and ``qzeros``.

    Attributes:
        storage: its name, e.g. ``gptq v1``.
        widths: bits that it can unpack.
        optional_zeros: a symmetric layer may have no ``qzeros``.
        mistaken: (what is added to a zero point of this layout by a reader of the other, the other's name).
    """

    @property
    def storage(self) -> str: ...

    @property
    def widths(self) -> tuple[int, ...]: ...

    @property
    def optional_zeros(self) -> bool: ...

    @property
    def mistaken(self) -> tuple[int, str]: ...

    def codes_shape(self, shape: tuple[int, int], bits: int) -> tuple[int, int]:
        """Shape of ``qweight`` for the layer's (N, K)."""
        ...

    def codes(self, qweight: torch.Tensor, shape: tuple[int, int], bits: int) -> torch.Tensor | CodeWords:
        """``qweight`` int32 -> uint8 [N, K], or words where they lie along the inputs."""
        ...

    def zeros(self, qzeros: torch.Tensor, outputs: int, bits: int) -> torch.Tensor:
        """``qzeros`` int32 [G, ceil(N * bits / 32)] -> uint8 [N, G], zero points as they are subtracted."""
        ...
