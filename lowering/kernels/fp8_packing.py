"""The shapes of a packed e4m3 weight."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.lowering.layout import up
from halfbyte.passes.ops import digit_block


@dataclass(frozen=True)
class Fp8Packing:
    """The shapes of a packed (N, K) weight and the counts its kernels take as operands.

    Attributes:
        outputs, inputs: logical (N, K).
        block_inputs: inputs that share a scale; K for scales that span a row.
    """

    outputs: int
    inputs: int
    block_inputs: int

    @property
    def column_blocks(self) -> int:
        return up(self.outputs, 64) // 64

    @property
    def padded(self) -> int:
        """Inputs in the packed weight."""
        return up(self.inputs, 8)

    @property
    def row(self) -> int:
        """Inputs between the rows of values, off the multiples of 4096 bytes, as in lowering/layout.py."""
        return self.padded + 32 if self.padded % 128 == 0 else self.padded

    @property
    def blocks(self) -> int:
        """Of inputs that share a scale."""
        return -(-self.inputs // self.block_inputs)

    @property
    def block(self) -> int:
        """Inputs that share a scale of the activations."""
        return self.block_inputs if self.blocks > 1 else self.padded

    @property
    def piece(self) -> int:
        """Inputs whose products are added before they are scaled."""
        return digit_block(self.block_inputs, self.inputs)

    @property
    def pieces(self) -> int:
        return -(-self.inputs // self.piece)

    @property
    def pieces_per_block(self) -> int:
        return self.block_inputs // self.piece if self.blocks > 1 else self.pieces

    @property
    def codes_shape(self) -> tuple[int, int, int, int]:
        return (self.column_blocks, self.padded // 4, 4, 64)

    @property
    def scale_shape(self) -> tuple[int, int, int]:
        return (self.column_blocks, self.blocks, 64)
